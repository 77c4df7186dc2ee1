from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from bigmodel.errors import PlanError
from bigmodel.plan.nodes.search import Cut, best_cut, in_proportion


def every_cut(layers: int, nodes: int) -> list[Cut]:
    """Return all cuts of `layers` layers, the slow way to the best one."""
    bounds = [(0, *inner, layers) for inner in combinations(range(1, layers), nodes - 1)]
    return [tuple(stop - start for start, stop in pairwise(each)) for each in bounds]


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (1.0, 3.0, 9.0), (5.0, 1.0, 2.0)])
@pytest.mark.parametrize("room", [3, 6, 20])
def test_the_cut_found_is_the_best_of_all(speeds: tuple[float, ...], room: int) -> None:
    def cost(cut: Cut) -> tuple[int, float]:
        seconds = [count * speed + 50 * max(count - room, 0) for count, speed in zip(cut, speeds)]
        return 0, sum(seconds)

    assert cost(best_cut(in_proportion(12, (1, 1, 1)), cost)) == min(map(cost, every_cut(12, 3)))


def test_a_node_is_left_with_as_many_layers_as_it_holds() -> None:
    def cost(cut: Cut) -> tuple[int, float]:  # the others hold 7 and stream up to 4, of which any takes 10 seconds
        streamed = [max(count - 7, 0) for count in cut[1:]]
        seconds = 5 * cut[0] + sum(10 + 3 * count for count in streamed if count)
        return sum(count > 4 for count in streamed), seconds

    assert best_cut((4, 11, 11), cost) == (4, 11, 11)
    assert best_cut((4, 11, 11), cost, held=(0, 7, 7)) == (12, 7, 7)


def test_a_cut_in_which_a_stage_does_not_fit_is_left() -> None:
    def cost(cut: Cut) -> tuple[int, float]:
        return sum(count for count, most in zip(cut, (2, 9)) if count > most), 0.0

    assert cost(best_cut((6, 4), cost)) == (0, 0.0)


def test_layers_are_in_proportion_and_each_node_has_one() -> None:
    assert in_proportion(10, (1, 1)) == (5, 5)
    assert in_proportion(10, (3, 1, 1)) == (6, 2, 2)
    assert in_proportion(4, (100, 1, 1)) == (2, 1, 1)
    with pytest.raises(PlanError, match="too few for 3 nodes"):
        in_proportion(2, (1, 1, 1))
