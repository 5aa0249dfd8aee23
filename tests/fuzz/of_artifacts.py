"""ONNX graphs, the records of plans, and entries of the cache."""

import dataclasses
import hashlib
import json
from pathlib import Path

import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper

from sd_quant.cache import MANIFEST, sound
from sd_quant.engines.onnx_input import onnx_files
from sd_quant.engines.tensorrt.plan import RTX_HEADER, PlanReport, describe_plan, read_record, record_path
from sd_quant.errors import ArtifactError

from .harness import Reader
from .mutations import LARGE, byte_edits, changed, document_edits, edited, to_json
from .shared import Files


def external(name: str, location: str) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, "offset": "0", "length": "16"}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def graph_with(locations: list[str]) -> bytes:
    """A network with weights in other files, some of them inside a branch."""
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])
    inside = external("constant", locations[1])
    branch = helper.make_graph([helper.make_node("Constant", [], ["z"], value=inside)], "branch", [], [
        helper.make_tensor_value_info("z", TensorProto.FLOAT, [4])
    ])  # fmt: skip
    nodes = [
        helper.make_node("If", ["which"], ["z"], then_branch=branch, else_branch=branch),
        helper.make_node("Add", ["z", "w"], ["y"]),
    ]
    which = helper.make_tensor_value_info("which", TensorProto.BOOL, [])
    graph = helper.make_graph(nodes, "g", [which], [output], [external("w", locations[0])])
    return helper.make_model(graph).SerializeToString()


LOCATIONS = [
    "a.data", "b.data", "sub/c.data", "", ".", "..", "/", "../not_for_readers", "sub/../../not_for_readers",
    "/proc/self/environ", "/etc/passwd", "a\0b", "x" * 300, "y/" * 3000 + "z", "x" * 20_000, "\x1b[2J\n", "‮a.data",
    "a.onnx", "*", "~", "a.data/", "./a.data", "sub", "no.data", "a.data/b", "\\\\host\\share", "C:\\a",
]  # fmt: skip


def onnx_graph() -> Reader:
    sound = graph_with(["a.data", "sub/c.data"])
    files = {"a.onnx": sound, "a.data": bytes(16), "b.data": bytes(16), "sub/c.data": bytes(16)}

    def mutate(recipe: tuple) -> Files:
        kind, edits = recipe
        if kind == "bytes":
            return {"a.onnx": edited(sound, edits, other=files["a.onnx"][::-1])}
        return {"a.onnx": graph_with([LOCATIONS[number % len(LOCATIONS)] for number in edits])}

    def check(folder: Path, found: list[Path]) -> None:
        assert all(path.is_file() and path.resolve().is_relative_to(folder.resolve()) for path in found)
        onnx.load(folder / "a.onnx", load_external_data=False)

    recipes = st.one_of(
        *[st.tuples(st.just("bytes"), byte_edits)] * 3, st.tuples(st.just("locations"), st.tuples(LARGE, LARGE))
    )
    return Reader("onnx", files, recipes, mutate, lambda folder: onnx_files(folder / "a.onnx"), check, weight=20)


def plan_record() -> Reader:
    header = RTX_HEADER.pack(b"vtrt", 80, 1, 7, 1, 116, b"vtrt", 0b1000) + bytes(80 - RTX_HEADER.size)
    report = PlanReport(
        "tensorrt_rtx", "1.7.1.116", ["SM89"], {"x": [[1, 64], [2, 64], [8, 64]]}, None, 1.5, {"a.onnx": "0" * 64},
        hashlib.sha256(header).hexdigest(), len(header), 3.5, 10**9,
    )  # fmt: skip
    files = {"a.plan": header, "a.plan.json": to_json(dataclasses.asdict(report))}

    def mutate(recipe: tuple) -> Files:
        kind, edits = recipe
        if kind == "node":
            return {"a.plan.json": to_json(changed(dataclasses.asdict(report), edits))}
        name = "a.plan" if kind == "header" else "a.plan.json"
        return {name: edited(files[name], edits, [(0, RTX_HEADER.size)])}

    def told(folder: Path) -> tuple[dict, dict]:
        return describe_plan(folder / "a.plan"), dataclasses.asdict(read_record(folder / "a.plan"))

    def check(folder: Path, found: tuple[dict, dict]) -> None:
        """The record is what the file says, and of the types that a build writes."""
        record = found[1]
        assert (
            json.loads(record_path(folder / "a.plan").read_text("utf-8")) | {"timing_cache": record["timing_cache"]}
            == record
        )
        assert all(type(target) is str for target in record["targets"]) and type(record["sha256"]) is str
        assert all(type(side) is int for shapes in record["profile"].values() for shape in shapes for side in shape)

    recipes = st.one_of(
        st.tuples(st.just("header"), byte_edits), st.tuples(st.just("bytes"), byte_edits),
        *[st.tuples(st.just("node"), document_edits)] * 2,
    )  # fmt: skip
    return Reader("plan", files, recipes, mutate, told, check, weight=20)


def cache_entry() -> Reader:
    """Entries of another origin, or without a whole file, are made again, which is a refusal here."""
    origin, contents = {"of": "a", "form": 2}, {"a.txt": b"text", "b.bin": bytes(range(64))}
    manifest = {"origin": origin, "files": {
        name: {"sha256": hashlib.sha256(content).hexdigest()} for name, content in contents.items()
    }}  # fmt: skip
    files = contents | {MANIFEST: to_json(manifest)}

    def mutate(recipe: tuple) -> Files:
        name, (kind, edits) = recipe
        if kind == "node":
            return {MANIFEST: to_json(changed(manifest, edits))}
        return {name: edited(files[name], edits)}

    def names(folder: Path) -> list[str]:
        if not (found := sound(folder, origin)):
            raise ArtifactError("the entry is damaged")
        return found

    def check(folder: Path, found: list[str]) -> None:
        assert set(found) <= contents.keys() and all((folder / name).read_bytes() == contents[name] for name in found)

    recipes = st.tuples(
        st.sampled_from(sorted(files)),
        st.one_of(st.tuples(st.just("bytes"), byte_edits), *[st.tuples(st.just("node"), document_edits)] * 2),
    )
    return Reader("cache", files, recipes, mutate, names, check, weight=20)
