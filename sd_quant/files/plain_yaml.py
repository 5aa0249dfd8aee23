"""Untrusted YAML: mappings, lists, texts and numbers, read in time and memory bounded by the file's size.

PyYAML's safe loader executes nothing, but a few lines can keep it busy for hours: base-60 numbers (``1:1:1...``), whose
digits it multiplies out, and merge keys (``<<``) and aliases, which repeat what they refer to. Here numbers are those
of YAML 1.2, aliases count with their content before anything is built, and merge keys and duplicate keys are refused.
Alternative not taken: a YAML 1.2 loader. NeMo writes its files with PyYAML, which reads ``yes`` as true.
"""

import re
from collections import Counter

import yaml

MAX_NODES = 20_000  # mappings, lists, texts and numbers, with aliases expanded; SDXL's config has 200
TAG = "tag:yaml.org,2002:"
NUMBER_TAGS = {
    f"{TAG}int": re.compile(r"[-+]?[0-9]{1,30}"),
    f"{TAG}float": re.compile(
        r"[-+]?(?:\.(?:inf|Inf|INF)|(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?)|\.(?:nan|NaN|NAN)"
    ),
}
TAGS = {f"{TAG}{name}" for name in ("bool", "null", "str", "seq", "map")} | NUMBER_TAGS.keys()


class Loader(yaml.SafeLoader):
    """PyYAML's Python loader (its C parser crashes on deep files) with YAML 1.2 numbers, no merge keys and no dates."""

    yaml_implicit_resolvers: dict = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag in TAGS - NUMBER_TAGS.keys()]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    composed = 0

    def compose_node(self, parent, index):
        self.composed += 1
        if self.composed > MAX_NODES:
            raise ValueError(f"it holds more than {MAX_NODES} entries")
        return super().compose_node(parent, index)


for _tag, _pattern in NUMBER_TAGS.items():
    Loader.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern.pattern})$"), list("-+.0123456789"))


def load_yaml(text: bytes) -> object:
    """Return the content of a YAML file. Raises yaml.YAMLError, ValueError or RecursionError for refused content."""
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        count(node, {})
        return loader.construct_document(node)
    finally:
        loader.dispose()


def count(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of nodes in ``node``, itself included and aliases expanded; ``known`` caches counts by id.

    Raises ValueError for more than ``MAX_NODES``, a node inside itself, another tag, a key that is no text or twice.
    """
    if id(node) in known:
        if not known[id(node)]:
            raise ValueError("a part of it contains itself")
        return known[id(node)]
    known[id(node)], total = 0, 1
    if node.tag not in TAGS:
        raise ValueError(f"it holds {node.tag[:80]!r}, expected mappings, lists, texts and numbers")
    if isinstance(node, yaml.MappingNode):
        keys = [key.value if isinstance(key, yaml.ScalarNode) else None for key, _ in node.value]
        if None in keys:
            raise ValueError("a key is a list or a mapping")
        if len(set(keys)) < len(keys):
            twice = next(key for key, number in Counter(keys).items() if number > 1)
            raise ValueError(f"the key {twice[:80]!r} stands twice in a mapping")
        children = [part for pair in node.value for part in pair]
    else:
        children = node.value if isinstance(node, yaml.SequenceNode) else []
    if node.tag in NUMBER_TAGS and not NUMBER_TAGS[node.tag].fullmatch(node.value):
        raise ValueError(f"{node.value[:80]!r} is no number")
    for child in children:
        total += count(child, known)
        if total > MAX_NODES:
            raise ValueError(f"it stands for more than {MAX_NODES} entries")
    known[id(node)] = total
    return total
