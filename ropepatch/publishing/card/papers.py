"""The papers of the methods, for those who cite them."""

from __future__ import annotations

import re
from typing import NamedTuple


class Paper(NamedTuple):
    """Title, authors as BibTeX separates them, and the year of the first version."""

    title: str
    authors: str
    year: int


PAPERS = {
    "arXiv:2104.09864": Paper(
        "RoFormer: Enhanced Transformer with Rotary Position Embedding",
        "Jianlin Su and Yu Lu and Shengfeng Pan and Ahmed Murtadha and Bo Wen and Yunfeng Liu",
        2021,
    ),
    "arXiv:2306.15595": Paper(
        "Extending Context Window of Large Language Models via Positional Interpolation",
        "Shouyuan Chen and Sherman Wong and Liangjian Chen and Yuandong Tian",
        2023,
    ),
    "kexue.fm/archives/9706": Paper("Transformer升级之路：11、将β进制位置进行到底", "Jianlin Su", 2023),
    "arXiv:2308.10882": Paper(
        "Giraffe: Adventures in Expanding Context Lengths in LLMs",
        "Arka Pal and Deep Karkhanis and Manley Roberts and Samuel Dooley and Arvind Sundararajan "
        "and Siddartha Naidu",
        2023,
    ),
    "arXiv:2309.00071": Paper(
        "YaRN: Efficient Context Window Extension of Large Language Models",
        "Bowen Peng and Jeffrey Quesnelle and Honglu Fan and Enrico Shippole",
        2023,
    ),
    "arXiv:2309.16039": Paper(
        "Effective Long-Context Scaling of Foundation Models",
        "Wenhan Xiong and Jingyu Liu and Igor Molybog and Hejia Zhang and Prajjwal Bhargava and Rui Hou "
        "and Louis Martin and Rashi Rungta and Karthik Abinav Sankararaman and Barlas Oguz "
        "and Madian Khabsa and Han Fang and Yashar Mehdad and Sharan Narang and Kshitiz Malik "
        "and Angela Fan and Shruti Bhosale and Sergey Edunov and Mike Lewis and Sinong Wang and Hao Ma",
        2023,
    ),
    "arXiv:2402.13753": Paper(
        "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens",
        "Yiran Ding and Li Lyna Zhang and Chengruidong Zhang and Yuanyuan Xu and Ning Shang and Jiahang Xu "
        "and Fan Yang and Mao Yang",
        2024,
    ),
    "arXiv:2403.00071": Paper(
        "Resonance RoPE: Improving Context Length Generalization of Large Language Models",
        "Suyuchen Wang and Ivan Kobyzev and Peng Lu and Mehdi Rezagholizadeh and Bang Liu",
        2024,
    ),
    "arXiv:2407.21783": Paper(
        "The Llama 3 Herd of Models",
        "Aaron Grattafiori and Abhimanyu Dubey and Abhinav Jauhri and others",
        2024,
    ),
    "arXiv:2410.06205": Paper(
        "Round and Round We Go! What makes Rotary Positional Encodings useful?",
        r"Federico Barbero and Alex Vitvitskyi and Christos Perivolaropoulos and Razvan Pascanu "
        r"and Petar Veli{\v{c}}kovi{\'c}",
        2024,
    ),
    "arXiv:2602.05258": Paper(
        "CoPE: Clipped RoPE as A Scalable Free Lunch for Long Context LLMs",
        "Haoran Li and Sucheng Ren and Alan Yuille and Feng Wang",
        2026,
    ),
}


def address(paper: str) -> str | None:
    """Where a paper is on the web; None for one that is on no known site."""
    if match := re.fullmatch(r"arXiv:(\d{4}\.\d{4,5})", paper):
        return f"https://arxiv.org/abs/{match[1]}"
    return f"https://{paper}" if re.fullmatch(r"[a-z.]+\.[a-z]+/[\w/.-]+", paper) else None


def bibtex(paper: str) -> str | None:
    """The BibTeX entry of a method's `paper`; None where it has none, or it is not known here."""
    cited, where = PAPERS.get(paper), address(paper)
    if cited is None or where is None:
        return None
    surname = cited.authors.split(" and ")[0].split()[-1].lower()
    fields = {"title": f"{{{cited.title}}}", "author": cited.authors, "year": str(cited.year)}
    number = paper.removeprefix("arXiv:")
    fields |= {} if number == paper else {"eprint": number, "archivePrefix": "arXiv"}
    word = re.split(r"\W", cited.title)[0].lower() if cited.title[0].isascii() else ""
    return entry(f"{surname}{cited.year}{re.sub('[^a-z]', '', word)}", fields | {"url": where})


def entry(key: str, fields: dict[str, str]) -> str:
    """A BibTeX entry of something published on the web."""
    lines = [f"  {name:<13} = {{{value}}}," for name, value in fields.items()]
    return "\n".join([f"@misc{{{key},", *lines, "}"])
