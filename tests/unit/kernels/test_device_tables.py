"""The table of a model: every element in one chunk of its own set of types, sent when changed."""

import numpy as np
import pytest
import torch

from steadygrad.kernels.device_tables import DeviceTable, Group, Head, Row

CPU = torch.device("cpu")
SIZES, KINDS = [5, 0, 40, 16, 33], [1, 0, 0, 1, 0]


def made():
    return DeviceTable(SIZES, KINDS, 2, CPU, chunk=16)


def test_chunks_cover_every_element_once():
    table = made()
    seen = {tensor: np.zeros(size, int) for tensor, size in enumerate(SIZES)}
    slots = []
    for tensor, first, length, slot in table.chunks.tolist():
        seen[tensor][first : first + length] += 1
        row = table.rows[tensor]
        assert slot == row[Row.SLOT] + first // 16
        assert first // 16 < row[Row.SLOTS]
        slots.append(slot)
    assert all((counts == 1).all() for counts in seen.values())
    assert sorted(slots) == list(range(table.slots))
    # The empty tensor has an empty chunk: somebody must look after its step count.
    assert (table.slots, table.rows[:, Row.SLOTS].tolist()) == (9, [1, 1, 3, 1, 3])


def test_sets_of_types_are_ranges_of_chunks():
    table = made()
    owners = [KINDS[tensor] for tensor in table.chunks[:, 0].tolist()]
    assert table.ranges == [(0, 7), (7, 2)]
    for kind, (start, count) in enumerate(table.ranges):
        assert owners[start : start + count] == [kind] * count


def test_what_is_filled_in_arrives():
    table = made()
    table.head[Head.FOUND_INF] = 7
    table.groups[1].view(np.float64)[Group.LR] = 0.25
    table.rows[4, Row.GRAD] = 2**40
    table.send()
    head, groups, rows = table.parts()
    assert head[Head.FOUND_INF] == 7
    assert groups.view(2, len(Group)).view(torch.float64)[1, Group.LR] == 0.25
    assert rows.view(len(SIZES), len(Row))[4, Row.GRAD] == 2**40
    # Kernels read two numbers at a time where a part starts at 16 bytes.
    assert all(part.data_ptr() % 16 == 0 for part in (head, groups, rows))


def test_it_is_sent_only_if_something_has_changed():
    table = made()
    table.send()
    table.parts()[0][Head.GROUPS] = 99  # to be overwritten by the next copy
    table.send()
    assert table.parts()[0][Head.GROUPS] == 99
    table.head[Head.GRAD_SCALE] = 1
    table.send()
    assert table.parts()[0].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("places", [Head, Group, Row])
def test_rows_are_of_whole_16_bytes(places):
    assert len(places) % 2 == 0
    assert max(places) == len(places) - 1
