"""``python -m tests.run learn --inputs 100000``: as ``run``, and inputs that lead somewhere new are changed again.

atheris watches which branches of ``sd_quant``, of PyYAML and of torch's restricted unpickler an input takes; what took
a new one is kept in ``tests/fuzz/corpus.json`` and varied. An input is the bytes from which Hypothesis draws the edits
of a sound file, so that edits are learnt and not the shape of a zip file. The road not taken is to give atheris the
files themselves: nearly all of what it makes of a sound archive ends at a checksum.

It takes ``pip install -e '.[fuzz]' -c constraints.txt``. What it finds is kept as ``run`` keeps it, with the same
``--replay``. A test reads all of the corpus, in which an input is some twenty bytes.
"""

import argparse
import importlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock

CORPUS = Path(__file__).with_name("corpus.json")
WATCHED = ["sd_quant", "yaml"]  # whole packages
LONGEST = 2048  # bytes of an input, from which some hundred numbers are drawn

WRITING = Lock()  # of the corpus, by the threads that wait for readers
TRIES = 20  # of a reader whose process ends early
FUZZER = "-print_final_stats=0 -verbosity=0 -detect_leaks=0 -close_fd_mask=0 -rss_limit_mb=0 -reload=0".split()


def run(wanted: argparse.Namespace) -> int:
    if wanted.child:
        return child(wanted)

    from .run import WRONG, table

    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as scratch:
        shares = shares_of(wanted, Path(scratch))
        with ThreadPoolExecutor(wanted.workers) as pool:
            learnt = pool.map(lambda name: learn(name, shares[name], wanted, scratch), shares)
            tallies = dict(zip(shares, learnt, strict=True))
    print(table(tallies))
    kept = {name: len(inputs) for name, inputs in read_corpus(wanted.corpus).items()}
    print(f"{time.monotonic() - start:.0f} s, seed {wanted.seed}; kept in the corpus: {kept}")
    return 1 if sum(tally.counts[WRONG] for tally in tallies.values()) else 0


def shares_of(wanted: argparse.Namespace, scratch: Path) -> dict[str, int]:
    """How many inputs each reader gets; what takes a second for one gets few."""
    from .readers import make_readers

    readers = {reader.name: reader for reader in make_readers(scratch / "made")}
    weights = {name: readers[name].weight for name in wanted.reader or readers}
    return {name: wanted.inputs * weight // sum(weights.values()) for name, weight in weights.items()}


def learn(name: str, inputs: int, wanted: argparse.Namespace, scratch: str):
    """One reader's inputs, in processes that are started again when an input kills them."""
    from sd_quant.files import write_json

    from .run import WRONG, Tally, preserve

    tally = Tally()
    corpus = Path(scratch) / f"{name}-corpus"
    corpus.mkdir()
    for number, content in enumerate(read_corpus(wanted.corpus).get(name, ())):
        (corpus / f"known{number}").write_bytes(content)
    for number in range(TRIES):
        missing, folder = inputs - tally.counts.total(), Path(scratch) / f"{name}-{number}"
        if missing <= 0:
            break
        folder.mkdir()
        given = [
            "--inputs", missing, "--seed", wanted.seed + 1000 * number, "--corpus", corpus, "--keep",
            wanted.keep, "--child", name, folder,
        ]  # fmt: skip
        ended = subprocess.run(
            [sys.executable, "-m", "tests.run", "learn", *map(str, given)], capture_output=True, text=True
        )
        with suppress(OSError):
            tally.add(**json.loads((folder / "tally.json").read_text()))
        if ended.returncode:
            tally.counts[WRONG] += 1
            preserve(folder / "input", wanted.keep, f"{name}-{number}-died", ended.stderr[-4000:])
        shutil.rmtree(folder, ignore_errors=True)
    with WRITING:
        known = read_corpus(wanted.corpus)
        known[name] = sorted({path.read_bytes() for path in corpus.iterdir()})
        write_json(wanted.corpus, {name: [each.hex() for each in inputs] for name, inputs in sorted(known.items())})
    return tally


def read_corpus(path: Path) -> dict[str, list[bytes]]:
    """The inputs that were kept, by reader."""
    found = json.loads(path.read_text()) if path.is_file() else {}
    return {name: list(map(bytes.fromhex, inputs)) for name, inputs in found.items()}


def child(wanted: argparse.Namespace) -> int:
    import atheris
    import torch  # before, as it is not to be watched
    from torch._weights_only_unpickler import Unpickler

    Unpickler.load = atheris.instrument_func(Unpickler.load)
    torch.set_num_threads(1)
    name, root = wanted.child[0], Path(wanted.child[1])
    with atheris.instrument_imports(include=WATCHED):
        readers = importlib.import_module("tests.fuzz.readers")
    from hypothesis import given, settings

    from sd_quant.process import mapped_bytes

    from .harness import Place
    from .run import EVERY_INPUT, MEMORY_CAP, Tally, tried

    [reader] = [each for each in readers.make_readers(root / "made") if each.name == name]
    place, tally = Place(reader, root), Tally()
    os.environ["TMPDIR"] = tempfile.tempdir = str(place.outside)
    corpus, kept = wanted.corpus.resolve(), wanted.keep.resolve()
    os.chdir(place.outside)

    def tell() -> None:
        (root / "tally.json").write_text(json.dumps(vars(tally)))

    @settings(**EVERY_INPUT)
    @given(reader.recipes)
    def read_one(recipe: object) -> None:
        kind, seconds, most = tried(place, recipe, kept, f"{name}-{wanted.seed}-{tally.counts.total()}")
        tally.add({kind: 1}, seconds, most)
        if tally.counts.total() % 100 == 0:
            tell()
        if tally.counts.total() >= wanted.inputs:
            tell()
            os._exit(0)  # libFuzzer counts bytes of which Hypothesis made no input too

    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes() + MEMORY_CAP, resource.RLIM_INFINITY))
    options = [f"-max_len={LONGEST}", f"-seed={wanted.seed}", "-timeout=60", f"-artifact_prefix={root}/", *FUZZER]
    atheris.Setup(["learn", *options, str(corpus)], read_one.hypothesis.fuzz_one_input)
    atheris.Fuzz()
    return 0
