"""A checkpoint to the Hub, with its evidence."""

from ropepatch.publishing.hub.pushing import Pushed, check_repo, push

__all__ = ["Pushed", "check_repo", "push"]
