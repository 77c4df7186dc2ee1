"""A loaded model with its engine, from its start until all of its memory is given back."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

from bigmodel.dispatch import undispatch
from bigmodel.server.answers.parsers.formats import AUTO, ModelFormats, formats_of
from bigmodel.server.embedding_config import EmbeddingConfig, embedding_config
from bigmodel.server.engine.budget import EngineOptions
from bigmodel.server.engine.build import build_engine
from bigmodel.server.engine.engine import Engine
from bigmodel.server.engine.sampling.grammar import GrammarCompiler
from bigmodel.server.engine.scheduling.request import Observer
from bigmodel.server.loading import Loaded
from bigmodel.server.models.garbage import exemptions
from bigmodel.server.models.weights import weight_bytes
from bigmodel.server.text.codec import TextCodec
from bigmodel.server.text.images import ImageSupport


class RunningModel:
    """What requests need of a loaded model.

    Attributes:
        name: Its name for clients.
        model: The model itself.
        plan: The plan that it was placed by.
        images: What turns images into inputs, for models whose prompts may have some.
        draft_model: The model that proposes tokens to it, if any.
        codec: Its tokenizer.
        engine: Its engine.
        made: What `garbage.exemptions` was when it was made.
    """

    def __init__(
        self,
        name: str,
        codec: TextCodec,
        engine: Engine,
        model: Any = None,
        plan: Any = None,
        images: ImageSupport | None = None,
        *,
        draft_model: Any = None,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> None:
        self.made = exemptions()
        self.name = name
        self.codec = codec
        self.engine = engine
        self.model = model
        self.plan = plan
        self.images = images
        self.draft_model = draft_model
        self._parsers = tool_parser, reasoning_parser
        self._grammars: GrammarCompiler | None = None
        self._grammar_lock = threading.Lock()

    @classmethod
    def of(
        cls,
        name: str,
        loaded: Loaded,
        options: EngineOptions,
        observer: Observer | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
        around_step: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> RunningModel:
        """A loaded model with an engine of its own, which is not started yet; see `build_engine`."""
        codec = TextCodec(loaded.tokenizer)
        engine = build_engine(
            loaded.model,
            codec,
            loaded.plan,
            options,
            draft_model=loaded.draft_model,
            checkpoint=loaded.checkpoint,
            adapters=loaded.adapters,
            known_runner=loaded.runner,
            observer=observer,
            on_failure=on_failure,
            around_step=around_step,
        )
        return cls(
            name,
            codec,
            engine,
            loaded.model,
            loaded.plan,
            loaded.images,
            draft_model=loaded.draft_model,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
        )

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that it was loaded with."""
        loaded = self.engine.core.runner.adapters
        return () if loaded is None else loaded.names

    @cached_property
    def formats(self) -> ModelFormats:
        """Formats of the model's tool calls and reasoning."""
        return formats_of(self.codec, *self._parsers)

    @cached_property
    def embedding_config(self) -> EmbeddingConfig:
        """How the model's states become an embedding. Raises ServeError where they cannot."""
        return embedding_config(self.model)

    @cached_property
    def weights(self) -> dict[str, int]:
        """Bytes of weights by device: placement does not change while the model is served."""
        return weight_bytes(self.model)

    def grammar_compiler(self) -> GrammarCompiler:
        """The grammar compiler, made at first use. Thread-safe."""
        with self._grammar_lock:
            if self._grammars is None:
                core = self.engine.core
                self._grammars = GrammarCompiler(self.codec.tokenizer, core.vocabulary_size, core.eos_ids)
            return self._grammars

    def close(self) -> None:
        """End its engine, and the processes that compile grammars and tokenise long texts."""
        self.engine.stop()
        self.codec.close()
        with self._grammar_lock:
            if self._grammars is not None:
                self._grammars.close()

    def unload(self) -> None:
        """Close it, and give back the memory of its weights, keys and values.

        What is in reference cycles goes with the next collection of garbage.
        """
        self.close()
        if self.engine.core.runner.adapters is not None:
            self.engine.core.runner.adapters.remove()
        self.engine.release()
        for model in (self.model, self.draft_model):
            if model is not None:
                undispatch(model, "meta")  # without a copy of weights on the host; who holds a tensor holds no memory
        self.model = self.draft_model = None


def forget_frames(error: BaseException | None) -> None:
    """Let the frames that an error has passed, and those of what it came from, hold nothing any more."""
    seen: set[int] = set()  # a chain may be a ring: a cause whose context is the error that was raised from it
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
