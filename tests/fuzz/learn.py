"""``python -m tests.run learn --inputs 100000``: as ``fuzz``, and inputs that lead somewhere new are changed again.

atheris watches which branches of ``sd_quant``, of PyYAML and of torch's restricted unpickler an input takes; what took
a new one is kept in ``tests/fuzz/corpus.json`` and varied. An input is the bytes from which Hypothesis draws the edits
of a sound file, so that edits are learnt and not the shape of a zip file. The road not taken is to give atheris the
files themselves: nearly all of what it makes of a sound archive ends at a checksum.

It takes ``pip install -e '.[fuzz]' -c constraints.txt``. What it finds is kept as ``fuzz`` keeps it, with the same
``--replay``. A test reads all of the corpus, in which an input is some twenty bytes.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import wrap

CORPUS = Path(__file__).with_name("corpus.json")
FUZZER = "-print_final_stats=0 -verbosity=0 -detect_leaks=0 -close_fd_mask=0 -rss_limit_mb=0 -reload=0 -timeout=60"
LONGEST = 2048  # bytes of an input, from which some hundred numbers are drawn


def read_corpus(path: Path) -> dict[str, list[bytes]]:
    """The inputs that were kept, by reader."""
    found = json.loads(path.read_text()) if path.is_file() else {}
    return {name: [bytes.fromhex(each) for line in lines for each in line.split()] for name, lines in found.items()}


def write_corpus(path: Path, known: Mapping[str, list[bytes]]) -> None:
    """Several inputs stand on a line."""
    lines = {}
    for name, inputs in sorted(known.items()):
        lines[name] = wrap(" ".join(sorted(each.hex() for each in set(inputs))), 110, break_long_words=False)
    path.write_text(json.dumps(lines, indent=1) + "\n")


def run(wanted: argparse.Namespace) -> int:
    import atheris
    import torch._weights_only_unpickler as unpickling  # torch before the rest, as it is not to be watched

    unpickling.Unpickler.load = atheris.instrument_func(unpickling.Unpickler.load)
    with atheris.instrument_imports(include=["sd_quant", "yaml"]):
        from . import run as fuzzing
    from hypothesis import given, settings

    known = read_corpus(wanted.corpus)
    wanted.corpus = wanted.corpus.resolve()

    def learn(reader: fuzzing.Reader, seed: int, folder: Path, one: Callable[[object], None]) -> None:
        for number, content in enumerate(known.get(reader.name, ())):
            (folder / f"known{number}").write_bytes(content)
        options = [f"-max_len={LONGEST}", f"-seed={seed}", f"-artifact_prefix={folder}/", *FUZZER.split(), str(folder)]
        test = settings(**fuzzing.EVERY_INPUT)(given(reader.recipes)(one))
        atheris.Setup(["learn", *options], test.hypothesis.fuzz_one_input)
        atheris.Fuzz()

    def keep(reader: fuzzing.Reader, folder: Path) -> None:
        known[reader.name] = [*known.get(reader.name, ()), *(path.read_bytes() for path in folder.iterdir())]
        write_corpus(wanted.corpus, known)

    return fuzzing.run(wanted, learn, keep)
