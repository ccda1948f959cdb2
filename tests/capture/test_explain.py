"""`program.explain()`: every call, what crosses a cut after it, and what is not looked into."""

from __future__ import annotations

import json

import torch
from torch import nn

import penstock as ps


class Marked(nn.Module):
    """A random call, one in place, and a value that is live across both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.drop = nn.Dropout(0.5)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Linear(8, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.relu(self.drop(self.first(x)))) + x[:, :2]


def explained(model: nn.Module, *, keep_closed: tuple[str, ...] = ()) -> ps.Program:
    return ps.capture(model, (torch.randn(5, 4),), keep_closed=keep_closed)


def test_rows_say_what_a_call_weighs_and_does() -> None:
    explanation = explained(Marked()).explain()
    rows = {row.label: row for row in explanation.rows}
    assert [row.number for row in explanation.rows] == list(range(len(explanation.rows)))
    assert rows["first"].parameters == 4 * 8 + 8
    assert rows["first"].weight_bytes == 4 * (4 * 8 + 8)
    assert rows["first"].outputs == ("float32[Bx8]",)
    assert rows["drop"].random
    assert not rows["first"].random
    assert rows["relu"].in_place
    assert not rows["second"].in_place
    assert explanation.batch_size == 5
    assert explanation.parameters == 4 * 8 + 8 + 8 * 2


def test_the_bytes_of_a_cut_are_those_of_the_example_batch() -> None:
    rows = {row.label: row for row in explained(Marked()).explain().rows}
    hidden, skipped = 5 * 8 * 4, 5 * 4 * 4
    assert rows["first"].cut_bytes == hidden + skipped
    assert explained(Marked()).explain().rows[-1].cut_bytes is None


def test_a_weight_counts_where_it_is_used_first() -> None:
    layer = nn.Linear(4, 4)
    explanation = explained(nn.Sequential(layer, nn.Tanh(), layer)).explain()
    assert sum(row.parameters for row in explanation.rows) == explanation.parameters == 20


def test_closed_modules_are_named_with_the_reason() -> None:
    explanation = explained(nn.Sequential(Marked()), keep_closed=("0",)).explain()
    assert explanation.closed == {"0": "kept closed as asked"}
    assert "closed: 0: kept closed as asked" in str(explanation)
    assert "one call, see below" in str(explanation)


def test_evaluation_is_said_to_differ_where_it_does() -> None:
    assert not explained(Marked()).explain().same_in_eval
    assert explained(nn.Sequential(nn.Linear(4, 4), nn.Tanh())).explain().same_in_eval


def test_text_and_plain_data_hold_the_same_calls() -> None:
    explanation = explained(Marked()).explain()
    data = json.loads(json.dumps(explanation.to_dict()))
    assert [row["label"] for row in data["rows"]] == [row.label for row in explanation.rows]
    assert data["possible_cuts"] == explanation.possible_cuts
    text = explanation.table().splitlines()
    assert text[0].split()[:2] == ["call", "what"]
    assert [line.split()[1] for line in text[1 : 1 + len(data["rows"])]] == [
        row["label"] for row in data["rows"]
    ]
    assert text[-1] == explanation.summary


class Blocks(nn.Module):
    """Three alike blocks, with functions of its own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Marked4() for _ in range(3))
        self.mixer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.sigmoid(block(x)) + 1
        return self.mixer(x.unsqueeze(1))


class Marked4(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.first(x))


def test_the_tree_of_modules() -> None:
    program = explained(Blocks())
    seconds = [1.0] * len(program)
    tree = program.explain(seconds).tree().splitlines()
    assert [line[: tree[0].index("class")].rstrip() for line in tree[:10]] == [
        "module",
        "Blocks",
        "├ stem",
        "├ blocks",
        "│ └ 0 … 2",
        "│   ├ first",
        "│   └ act",
        "├ sigmoid() ×3, add() ×3, unsqueeze()",
        "└ mixer",
        "",
    ]
    group = tree[4]
    assert "Marked4 ×3" in group
    assert " 6 " in group
    assert "240 B" in group
    assert f"{6 / 15:.0%}" in group  # of the time: 6 of 15 calls
    assert "80 B" in group  # enters: five rows of four numbers
    assert "one call: it has fused kernels" in tree[8]
    assert not any("first" in line for line in program.explain().tree(depth=2).splitlines())
    assert "time" not in program.explain().tree().splitlines()[0]


def test_why_a_module_is_closed_and_what_would_open_it() -> None:
    class Peeks(Marked4):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.act(x) if x.sum() > 0 else x

    notes = explained(nn.Sequential(Peeks(), Peeks())).explain().notes()
    (closed,) = (note for note in notes if note.startswith("closed: "))
    assert closed.startswith("closed: 0, 1: its Python reads a tensor's value")
    assert closed.endswith(
        "To open it: compute with it (torch.where), do it in a plain function that takes and gives "
        "tensors, or decide outside of the model"
    )
