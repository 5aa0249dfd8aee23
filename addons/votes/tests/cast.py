"""A page's key and voters' files, as its script saves them, for tests."""

import json
import random
from pathlib import Path

from sd_quant_votes.ballots import checksum
from sd_quant_votes.page import DAMAGED, RULE, VOTE

PAGE = "0123456789abcdef"
COMPARED = [{"a": "full precision", "b": "int8"}, {"a": "full precision", "b": "nvfp4"}]


def write_key(folder: Path) -> Path:
    """Twenty pairs of each of two comparisons, two pairs of equal images and two with a damaged one."""
    kinds = [(VOTE, 0)] * 20 + [(VOTE, 1)] * 20 + [("equal", None)] * 2 + [(DAMAGED, None)] * 2
    pairs = {
        f"pair{index}": {
            "kind": kind, "comparison": comparison, "prompt": f"prompt {index % 20}", "index": index % 20,
            "a": f"a{index}", "b": f"b{index}",
        }
        for index, (kind, comparison) in enumerate(kinds)
    }  # fmt: skip
    key = {
        "schema_version": 1, "page": PAGE, "seed": 1, "against": None, "most_pairs": 64, "rule": RULE,
        "comparisons": COMPARED, "pairs": pairs,
    }  # fmt: skip
    (folder / "votes_key.json").write_text(json.dumps(key))
    return folder


def write_ballot(folder, name, b_wins=(10, 18), missed=0, decided=0, undecided=0, page=PAGE, **changes):
    """A file of a voter who prefers ``b`` in so many pairs of each comparison, by sides at random."""
    key = json.loads((folder / "votes_key.json").read_text())
    chance = random.Random(name)
    cast = []
    for number, (key_of_pair, pair) in enumerate(key["pairs"].items()):
        if pair["kind"] == VOTE:
            place = number % 20
            wanted = "neither" if place >= 20 - undecided else "b" if place < b_wins[pair["comparison"]] else "a"
        elif pair["kind"] == DAMAGED:
            wanted = "b" if number - 42 < missed else "a"
        else:
            wanted = "a" if number - 40 < decided else "neither"
        first = chance.choice("ab")
        answer = "neither" if wanted == "neither" else "first" if wanted == first else "second"
        cast.append({"pair": key_of_pair, "first": pair[first], "answer": answer, "ms": 1000 + number})
    chance.shuffle(cast)
    content = {"format": "sd-quant votes 1", "page": page, "session": f"of {name}", "voter": name, "votes": cast}
    content |= changes
    content["checksum"] = checksum(content)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content))
    return path
