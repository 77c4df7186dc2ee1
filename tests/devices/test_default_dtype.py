"""While a model is built, no other thread computes with the default dtype that transformers sets for it."""

from __future__ import annotations

import threading

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bigmodel.devices.default_dtype import changing_default_dtype, computing_beside_builds


def test_threads_that_compute_do_so_side_by_side() -> None:
    both = threading.Barrier(2)

    def compute() -> None:
        with computing_beside_builds():
            both.wait(60)

    other = threading.Thread(target=compute)
    other.start()
    compute()
    other.join(60)
    assert not both.broken


def test_one_that_builds_waits_for_those_that_compute_and_has_them_wait() -> None:
    order: list[str] = []
    computing, built = threading.Event(), threading.Event()

    def build() -> None:
        assert computing.wait(60)
        with changing_default_dtype():
            order.append("build")
        built.set()

    builder = threading.Thread(target=build)
    builder.start()
    while not built.is_set():  # step after step, without a pause
        with computing_beside_builds():
            computing.set()
            order.append("step")
    builder.join(60)
    with computing_beside_builds():
        order.append("step")
    assert order[0] == order[-1] == "step"
    assert order.count("build") == 1


def test_steps_beside_builds_see_the_default_dtype_of_the_process() -> None:
    seen: set[torch.dtype] = set()
    done = threading.Event()

    def compute() -> None:
        while not done.is_set():
            with computing_beside_builds():
                seen.add((torch.arange(2) * 0.5).dtype)

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 32}
    config = LlamaConfig(num_hidden_layers=2, **sizes)
    thread = threading.Thread(target=compute)
    thread.start()
    for _ in range(10):
        with changing_default_dtype():
            LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    done.set()
    thread.join(60)
    assert seen == {torch.float32}


def test_an_error_lets_the_others_go_on() -> None:
    for context in (changing_default_dtype, computing_beside_builds):
        try:
            with context():
                raise OSError("the disk is gone")
        except OSError:
            pass
    with changing_default_dtype():
        pass
    with computing_beside_builds():
        pass
