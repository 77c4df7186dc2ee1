"""Operations on some of the tokens that they were recorded on."""

from __future__ import annotations

import pytest
import torch

from bigmodel.profile.model.experts import RouterChoice, distinct_experts
from bigmodel.profile.trace.work import ATTENTION, CALL, CONVOLUTION, MOVE, PRODUCT, Work, scale_work, work_of

aten = torch.ops.aten


def test_a_product_counts_its_matrix_and_its_rows() -> None:
    left, right = torch.ones(3, 4), torch.ones(4, 5)
    assert work_of(aten.mm.default, (left, right), {}, left @ right) == Work("product", "float32", 20, 3, 48 + 80)
    assert work_of(aten.addmm.default, (torch.ones(5), left, right), {}, left @ right) == Work(
        "product", "float32", 20, 3, 48 + 80
    )


def test_a_view_costs_only_its_call_and_a_query_nothing() -> None:
    x = torch.ones(4)
    assert work_of(aten.view.default, (x, [2, 2]), {}, x.view(2, 2)) == Work("call")
    assert work_of(torch.ops.prim.device.default, (x,), {}, x.device) is None


def test_a_lookup_moves_its_rows_and_not_its_table() -> None:
    table, ids = torch.ones(1000, 8), torch.tensor([1, 2])
    assert work_of(aten.embedding.default, (table, ids), {}, table[ids]) == Work("move", "float32", nbytes=2 * 64)


def test_other_operations_move_the_bytes_that_they_read_and_write() -> None:
    x = torch.ones(10)
    assert work_of(aten.add.Tensor, (x, x), {}, x + x) == Work("move", "float32", nbytes=120)


def test_causal_attention_takes_half() -> None:
    q = torch.ones(1, 2, 8, 4)
    whole = work_of(aten._scaled_dot_product_flash_attention_for_cpu.default, (q, q, q, 0.0, False), {}, q)
    causal = work_of(aten._scaled_dot_product_flash_attention_for_cpu.default, (q, q, q, 0.0, True), {}, q)
    assert whole is not None
    assert causal is not None
    assert (whole.kind, whole.elements, whole.rows) == ("attention", 2 * 64, 8)
    assert causal.elements == whole.elements // 2


def test_a_batch_of_products_reads_the_larger_side_whichever_it_is() -> None:
    matrices, rows = torch.ones(2, 6, 4), torch.ones(2, 4, 1)
    work = work_of(aten.bmm.default, (matrices, rows), {}, matrices @ rows)
    turned = work_of(aten.bmm.default, (rows.mT, matrices.mT), {}, rows.mT @ matrices.mT)
    assert work == turned == Work("product", "float32", 48, 1, 4 * (48 + 8))


def test_experts_that_are_not_chosen_are_not_read() -> None:
    tokens, experts = torch.ones(2, 4), torch.ones(8, 4, 6)
    unknown = work_of(aten._grouped_mm.default, (tokens, experts), {}, torch.ones(2, 6))
    assert unknown is not None
    assert unknown.elements == int(distinct_experts(8, 2) * 24)
    one_token = work_of(aten._grouped_mm.default, (tokens, experts), {}, torch.ones(2, 6), RouterChoice(1, 2, 8))
    assert one_token is not None
    assert (one_token.elements, one_token.rows) == (2 * 24, 1)


def test_pointwise_convolutions_are_of_a_separate_kind() -> None:
    image, spanning, pointwise = torch.ones(2, 4, 8, 8), torch.ones(6, 4, 3, 3), torch.ones(6, 4, 1, 1)
    rest = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    kinds = [
        work.kind
        for weight in (spanning, pointwise)
        if (work := work_of(aten.convolution.default, (image, weight, *rest), {}, torch.ones(2, 6, 8, 8))) is not None
    ]
    assert kinds == ["convolution", "pointwise"]


WORK = Work(PRODUCT, elements=1000, rows=64, nbytes=400)


@pytest.mark.parametrize("kind", [PRODUCT, CONVOLUTION])
def test_scaled_products_have_the_same_matrix_and_fewer_rows(kind: str) -> None:
    found = scale_work(Work(kind, elements=1000, rows=64), 0.25)
    assert (found.elements, found.rows) == (1000, 16)


def test_scaled_attention_has_fewer_keys_and_values() -> None:
    found = scale_work(Work(ATTENTION, elements=1000, rows=64, nbytes=400), 0.25)
    assert (found.elements, found.rows, found.nbytes) == (250, 16, 100)


def test_scaled_moves_have_fewer_bytes_and_calls_are_unchanged() -> None:
    assert scale_work(Work(MOVE, nbytes=400), 0.25).nbytes == 100
    assert scale_work(Work(CALL), 0.25) == Work(CALL)


def test_scaled_work_has_at_least_one_row_and_is_unchanged_at_share_one() -> None:
    assert scale_work(WORK, 1e-6).rows == 1
    assert scale_work(WORK, 1.0) == WORK
