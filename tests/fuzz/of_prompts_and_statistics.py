"""Prompts, and statistics that were collected elsewhere."""

import json
from pathlib import Path

import torch
from hypothesis import strategies as st
from safetensors.torch import load as load_safetensors

from sd_quant.calibration.collected_elsewhere import read_statistics
from sd_quant.calibration.prompts import read_prompts
from sd_quant.calibration.store import Entries, content_digest, pack

from ..unit.calibration.some_statistics import CONTRACT, LAYERS, ORIGIN
from ..unit.calibration.some_statistics import statistics as some_statistics
from .harness import Reader
from .mutations import byte_edits, changed, document_edits, edited, to_json
from .shared import Files, decisive_header, described, digest, header_of, with_header


def prompts() -> Reader:
    text = "a cat\n\n  ein Kätzchen 🐈 \r\n../../etc/passwd\na dog, 35 mm, 1024 x 1024\n".encode()
    table = 'id\timage_id\tcaption\n1\t42\ta cat\n2\t43\t"a ""big"" dog"\n\n3\t44\tein Kätzchen 🐈\n'.encode()
    drawbench = 'Prompts,Category\nA red car.,Colors\n"Two cups, one ""big"" 🐈.",Counting\n'.encode()
    entries = {"a1": {"category": "food", "prompt": "a soup"}, "b2": {"category": "logo", "prompt": "ein Kätzchen 🐈"}}
    captions = {"annotations": [{"image_id": 9, "caption": "a cat\n"}, {"image_id": 9, "caption": "a dog"}]}
    files = {
        "prompts.txt": b"\xef\xbb\xbf" + text, "prompts.tsv": table, "prompts.csv": drawbench,
        "entries.json": json.dumps(entries).encode(), "captions.json": json.dumps(captions).encode(),
    }  # fmt: skip

    def mutate(recipe: tuple) -> Files:
        name, edits = recipe
        other = files["prompts.tsv" if name == "prompts.txt" else "prompts.txt"]
        return {name: edited(files[name], edits, other=other)}

    def check(folder: Path, found: list[list[str]]) -> None:
        for prompts in found:
            assert prompts and all(prompt == prompt.strip() and 0 < len(prompt) <= 2000 for prompt in prompts)
            assert not any("\n" in prompt for prompt in prompts)
        lines = (folder / "prompts.txt").read_bytes().decode("utf-8-sig").split("\n")
        assert found[0] == [line.strip() for line in lines if line.strip()]
        rest = (folder / "prompts.tsv").read_text("utf-8")
        assert all(prompt.replace('"', "") in rest.replace('"', "") for prompt in found[1])

    def read(folder: Path) -> list[list[str]]:
        return [read_prompts(folder / name) for name in files]

    return Reader("prompts", files, st.tuples(st.sampled_from(sorted(files)), byte_edits), mutate, read, check, 20)


def statistics(scratch: Path) -> Reader:
    entries = Entries(scratch, ORIGIN, ["a cat", "ein Kätzchen 🐈"])
    for segment in (range(0, 1), range(1, 2)):
        entries.write(segment, some_statistics(segment))
    files = {path.name: path.read_bytes() for path in sorted(entries.folder.iterdir())}

    def mutate(recipe: tuple) -> Files:
        number, (kind, edits), signed = recipe
        name = sorted(files)[number]
        data = files[name]
        if kind == "bytes":
            return {name: edited(data, edits, decisive_header(data), files[sorted(files)[1 - number]])}
        header, content = header_of(data)
        if kind == "header":
            return {name: with_header(changed(header, edits), content)}
        known = header["__metadata__"]
        if kind == "content":
            content = edited(content, edits)
        else:
            known[kind] = to_json(changed(json.loads(known[kind]), edits)).decode()
        if signed and (kind != "content" or len(content) == len(header_of(data)[1])):
            tensors = load_safetensors(with_header(header_of(data)[0], content))
            known["digest"] = content_digest(known["origin"], known["prompts"], tensors)
        return {name: with_header(header, content)}

    def packed(folder: Path) -> dict[str, torch.Tensor]:
        return pack(read_statistics(folder, LAYERS, CONTRACT, {"form": 2, **ORIGIN}, 2))

    def check(folder: Path, found: dict[str, tuple]) -> None:
        """Of the same layers and inputs, finite, no range below zero."""
        tensors = packed(folder)
        assert tensors.keys() == sound.keys() and all(tensor.isfinite().all() for tensor in tensors.values())
        assert all((tensor >= 0).all() for name, tensor in tensors.items() if name.endswith("amax"))

    def loaded(folder: Path) -> dict[str, tuple]:
        return {name: digest(tensor) for name, tensor in packed(folder).items()}

    sound = loaded(entries.folder)
    kinds = st.one_of(
        described,
        st.tuples(st.sampled_from(["origin", "prompts"]), document_edits),
        st.tuples(st.just("content"), byte_edits),
    )
    recipes = st.tuples(st.integers(0, 1), kinds, st.sampled_from([True, True, True, False]))
    return Reader("statistics", files, recipes, mutate, loaded, check, weight=20)
