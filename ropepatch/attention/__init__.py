"""Causal attention by places: what no table of frequencies can say.

`bands` says which keys a query sees from which place, `kernels` reads them by stock kernels, `scored` with
the scores written down, for a block of queries at a time. `maps` are the published ones, and `map_attention`
puts one into a model.
"""

from ropepatch.attention.attention_map import AttentionMap as AttentionMap
from ropepatch.attention.mapping import Mapped as Mapped
from ropepatch.attention.mapping import map_attention as map_attention
from ropepatch.attention.mapping import mapped as mapped
from ropepatch.attention.maps import MAPS as MAPS
from ropepatch.attention.maps import make_map as make_map
