"""How many proposals are fastest, by the predicted seconds of wider passes."""

from __future__ import annotations

import pytest

from bigmodel.plan import Plan
from bigmodel.plan.result.speculation import WORTHWHILE, Speculation

from .test_plan import PLAN

STREAMED = Speculation(4, ((1, 1.0), (2, 1.0), (5, 1.0), (80, 1.0)))
"""As of streamed dense layers: a pass costs what fetching them does."""

MIXTURE = Speculation(4, ((1, 1.0), (2, 1.95), (5, 4.6), (16, 10.0), (80, 12.0)))
"""As of streamed experts: each token chooses others, until nearly all are chosen."""


def slow_count(found: Speculation, sequences: int) -> int:
    """The number of proposals of most expected tokens per second, by adding up the outcomes."""
    rates = []
    for count in range(found.most + 1):
        a = found.acceptance
        chances = [a**k * (1 - a) for k in range(count)] + [a**count]
        tokens = sum(chance * (k + 1) for k, chance in enumerate(chances))
        rates.append(tokens / (found.pass_seconds(sequences * (1 + count)) + count * found.proposing))
    return rates.index(max(rates)) if max(rates) >= WORTHWHILE * rates[0] else 0


def test_all_are_proposed_where_a_pass_costs_what_its_weights_do() -> None:
    assert STREAMED.count(1) == STREAMED.count(16) == 4
    assert STREAMED.gain(4) == pytest.approx(1 + 0.7 + 0.7**2 + 0.7**3 + 0.7**4)


def test_none_are_proposed_to_a_mixture_that_computes_one_sequence_and_some_where_it_computes_many() -> None:
    assert MIXTURE.count(1) == 0
    assert MIXTURE.count(16) > 0
    assert MIXTURE.pays(16)
    assert not MIXTURE.pays(1)


@pytest.mark.parametrize("found", [STREAMED, MIXTURE, Speculation(6, ((1, 1.0), (7, 1.9)), 0.5, 0.1)])
def test_the_count_is_that_of_most_expected_tokens_per_second(found: Speculation) -> None:
    assert [found.count(n) for n in (1, 2, 3, 16)] == [slow_count(found, n) for n in (1, 2, 3, 16)]


def test_a_slow_draft_model_is_not_worth_its_passes() -> None:
    assert Speculation(4, STREAMED.seconds, proposing=1.0).count(1) == 0


def test_seconds_lie_between_those_predicted() -> None:
    assert MIXTURE.pass_seconds(2) == 1.95
    assert MIXTURE.pass_seconds(48) == pytest.approx(11.0)
    assert MIXTURE.pass_seconds(144) == pytest.approx(14.0)


def test_the_plan_says_so_and_keeps_it_as_json() -> None:
    from dataclasses import replace

    for found, words in ((STREAMED, "4 tokens proposed"), (MIXTURE, "speculation is off")):
        made = replace(PLAN, speculation=found, batch_size=1)
        assert words in str(made)
        assert words in made.explain()
        assert Plan.from_json(made.to_json()) == made
