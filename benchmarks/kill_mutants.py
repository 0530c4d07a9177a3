"""Faults to plant: edits of nodes that a seed draws.

An edit is whole lines before and after, with two lines on either side that tell where they belong
once the file has changed.
"""

import ast
import random
import re
import subprocess
from collections import defaultdict
from pathlib import Path

SOURCE = Path("src/steadygrad")
AROUND = 2
OPERATORS = {ast.Add: "+-", ast.Sub: "-+", ast.Mult: "*/", ast.Div: "/*", ast.FloorDiv: "//*"}
WORDS = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
CALLS = {"min": "max", "any": "all", "minimum": "maximum", "amin": "amax", "floor": "ceil"}
CALLS |= {after: before for before, after in CALLS.items()}
PAIRS = (("<", ">="), (">", "<="), ("==", "!="), ("is", "is not"), ("in", "not in"))
INVERSE = dict(PAIRS) | {b: a for a, b in PAIRS}
SIGNS = {ast.Lt: "<", ast.GtE: ">=", ast.Gt: ">", ast.LtE: "<=", ast.Eq: "==", ast.NotEq: "!="}
SIGNS |= {ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"}
# Arguments that change no result, or only where a warning is said to come from.
IDLE = {"strict", "stacklevel"}
STATEMENTS = (ast.Assign, ast.AugAssign, ast.Expr, ast.Return, ast.Raise, ast.Delete, ast.Continue)


def room_of(file):
    """The package folder; modules beside the packages are one room."""
    parts = Path(file).relative_to(SOURCE).parts[:-1]
    return "/".join(parts) or "top level"


def inner(node):
    """Nodes whose edit may show: no annotation, decorator, import, message, text or type check."""
    if isinstance(node, (ast.JoinedStr, ast.Raise)):
        return
    for name, field in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "bases"}:
            continue
        for child in field if isinstance(field, list) else [field]:
            if isinstance(child, ast.AST) and not is_idle(child):
                yield child
                yield from inner(child)


def is_idle(node):
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    if isinstance(node, ast.Assign):
        return bool(re.match("__all__|__version__", ast.unparse(node)))
    is_idle_argument = isinstance(node, ast.keyword) and node.arg in IDLE
    return is_idle_argument or isinstance(node, (ast.Import, ast.ImportFrom))


def is_alias(node):
    return isinstance(node, ast.Assign) and bool(
        re.search(
            r"(Callable|Literal|Union|Annotated|TypeVar|NewType)[\[(]| \| ", ast.unparse(node)
        )
    )


class Text:
    """A file's bytes and where nodes lie in them."""

    def __init__(self, text):
        self.bytes = text.encode()
        self.starts = [0]
        for line in self.bytes.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def span(self, node):
        return (
            self.starts[node.lineno - 1] + node.col_offset,
            self.starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def gap(self, left, right):
        """Between two operands."""
        return self.span(left)[1], self.span(right)[0]


def changes_of(text):
    """Every (kind, start, end, new bytes) that may be drawn in a file."""
    source, found = Text(text), []

    def replace(kind, span, old, new):
        part = source.bytes[slice(*span)].decode()
        if "#" not in part and part.count(old) == 1:
            found.append((kind, *span, part.replace(old, new).encode()))

    def whole(kind, node, new):
        found.append((kind, *source.span(node), new.encode()))

    for node in inner(ast.parse(text)):
        if isinstance(node, STATEMENTS) and not is_alias(node):
            # A text by itself is documentation, and a bare return says nothing.
            if not isinstance(getattr(node, "value", 0), (ast.Constant, type(None))) or isinstance(
                node, (ast.Assign, ast.AugAssign)
            ):
                whole("deleted statement", node, "pass")
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            texts = (ast.JoinedStr, ast.List, ast.Tuple)
            if not any(
                isinstance(side, texts)
                or (isinstance(side, ast.Constant) and isinstance(side.value, str))
                for side in (node.left, node.right)
            ):
                pair = OPERATORS[type(node.op)]
                replace(
                    "exchanged operator", source.gap(node.left, node.right), pair[:-1], pair[-1]
                )
        elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
            replace("exchanged operator", source.gap(*node.values), *WORDS[type(node.op)])
        elif isinstance(node, ast.Call) and (name := name_of(node.func)) in CALLS:
            start, end = source.span(node.func)
            found.append(("exchanged operator", end - len(name), end, CALLS[name].encode()))
        elif isinstance(node, ast.Constant) and (new := moved(node.value)) is not None:
            whole("moved constant", node, new)
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            sign = SIGNS[type(node.ops[0])]
            span = source.gap(node.left, node.comparators[0])
            replace("inverted comparison", span, sign, INVERSE[sign])
        if isinstance(node, (ast.If, ast.IfExp, ast.While)) and not isinstance(
            node.test, ast.Compare
        ):
            start, end = source.span(node.test)
            new = b"not (" + source.bytes[start:end] + b")"
            found.append(("negated condition", start, end, new))
    return found


def name_of(function):
    return getattr(function, "id", None) or getattr(function, "attr", None)


def moved(value):
    """A number's neighbour, as text."""
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, int):
        return str(value + 1)
    if isinstance(value, float):
        return repr(value * 1.5) if value else "1.0"
    return None


def edit_of(file, text, start, end, new):
    """The change as lines before and after; None if the file would not compile."""
    data = text.encode()
    changed = (data[:start] + new + data[end:]).decode()
    try:
        compile(changed, file, "exec", dont_inherit=True)
    except SyntaxError:
        return None
    first, lines = data[:start].count(b"\n"), text.splitlines()
    last = data[:end].count(b"\n")
    after = changed.splitlines()[first : last + 1 + len(changed.splitlines()) - len(lines)]
    return {
        "file": str(file),
        "line": first + 1,
        "above": lines[max(0, first - AROUND) : first],
        "before": lines[first : last + 1],
        "after": after,
        "below": lines[last + 1 : last + 1 + AROUND],
    }


def draw(root, seed, count):
    """Mutants of all rooms, in proportion to the lines that can be changed."""
    rooms = defaultdict(lambda: defaultdict(list))
    for path in sorted((root / SOURCE).rglob("*.py")):
        text, file = path.read_text(), path.relative_to(root)
        for kind, *change in changes_of(text):
            line = text.encode()[: change[0]].count(b"\n")
            rooms[room_of(file)][kind].append((str(file), line, change))
    weight = {
        room: len({p[:2] for ps in kinds.values() for p in ps}) for room, kinds in rooms.items()
    }
    random_, mutants = random.Random(seed), []
    for room, kinds in sorted(rooms.items()):
        places = {kind: random_.sample(found, len(found)) for kind, found in sorted(kinds.items())}
        wanted = max(8, round(count * weight[room] / sum(weight.values())))
        seen, number = set(), 0
        while number < wanted and any(places.values()):
            # By kind first: nearly every line could be deleted.
            kind = random_.choice([kind for kind, left in places.items() if left])
            file, line, change = places[kind].pop()
            edit = edit_of(file, (root / file).read_text(), *change)
            if edit and (file, line) not in seen:
                seen.add((file, line))
                number += 1
                name = f"{room}-{number}"
                mutants.append({"id": name, "kind": kind, "room": room, "edits": [edit]})
    return mutants


def place_of(lines, edit):
    """Where an edit belongs in changed lines: the place with most of its neighbours; or None."""
    before, best = edit["before"], (0, None)
    for at in range(len(lines) - len(before) + 1):
        if lines[at : at + len(before)] == before:
            above = sum(a == b for a, b in zip(lines[:at][::-1], edit["above"][::-1]))  # noqa: B905
            below = sum(a == b for a, b in zip(lines[at + len(before) :], edit["below"]))  # noqa: B905
            near = 1 / (2 + abs(at + 1 - edit["line"]))
            best = max(best, (above + below + near, at))
    known = len(edit["above"]) + len(edit["below"])
    # A line such as `return None` is no place by itself.
    return best[1] if best[0] >= min(known, 2) else None


def planted(root, mutant):
    """The changed files' new texts, by name; None where the mutant's lines are gone."""
    texts = {}
    for name in {edit["file"] for edit in mutant["edits"]}:
        if not (root / name).exists():
            return None
        lines = (root / name).read_text().splitlines()
        own = [(place_of(lines, edit), edit) for edit in mutant["edits"] if edit["file"] == name]
        if any(at is None for at, _ in own):
            return None
        for at, edit in sorted(own, key=lambda one: -one[0]):
            lines[at : at + len(edit["before"])] = edit["after"]
        texts[name] = "\n".join(lines) + "\n"
        try:
            compile(texts[name], name, "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            return None
    return texts


def git(root, *arguments):
    command = ["git", *arguments]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
