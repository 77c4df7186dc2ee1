"""Benchmarks: one file per question, with peers side by side and results stored as data.

    python -m benchmarks                      lists the benchmarks
    python -m benchmarks decode --rounds 7    runs one (`bigmodel bench decode --rounds 7` is the same)

A benchmark is a module of this package with a docstring whose first line is the question that it answers, a function
``add_arguments(parser)`` for its own options, and a function ``run(options) -> Report``. `command` adds the common
options ``--rounds``, ``--seed``, ``--device``, ``--quick``, ``--workdir``, ``--json``, ``--csv`` and others. A
benchmark lists the devices that it supports in ``DEVICES``, and says in ``ONLY`` why CUDA's are not among them. Shared
code is in `harness`, checkpoints are in `checkpoints`.

    python -m benchmarks gpu --minutes 10     runs those that are about accelerators, each in a process of its own
"""
