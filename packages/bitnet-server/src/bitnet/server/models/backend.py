"""What computes the answers: a model in this process, or something elsewhere that is asked in the same way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from bitnet.core import Chunk, Completion, Load, Model, Request
from bitnet.server.forms.lazy import LazyMatchers
from bitnet.server.forms.structured import Compiler, Constraints, Form, InThread

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from bitnet.core.devices.select import Selection
    from bitnet.core.engine.constraint import MakesConstraint
    from bitnet.core.engine.options import OptionArguments
    from bitnet.core.hal import DeviceInfo
    from bitnet.core.model.config import ModelConfig
    from bitnet.core.model.pooling import Pooling
    from bitnet.core.text.chat import ChatTemplate
    from bitnet.core.text.prompt import ChatTokens
    from bitnet.core.text.tokenizer import Tokenizer
    from bitnet.server.forms.token_rules import TokenRules

T = TypeVar("T")


class ServedModel(Protocol):
    """What endpoints ask about a model; :class:`~bitnet.core.Model` has the same."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def chat_template(self) -> ChatTemplate | None: ...
    @property
    def path(self) -> Path: ...
    @property
    def context(self) -> int: ...
    @property
    def device(self) -> DeviceInfo: ...
    @property
    def devices(self) -> Sequence[DeviceInfo]: ...
    @property
    def selection(self) -> Selection | None: ...
    @property
    def cache_bytes(self) -> int: ...

    def check_file(self, *, within: float = 0.0) -> None: ...
    def load(self) -> Load: ...
    def close(self) -> None: ...
    def chat_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continued: bool = False,
        thinks: bool | None = None,
    ) -> ChatTokens: ...


class Embed(Protocol):
    """:meth:`Model.embed_async <bitnet.core.Model.embed_async>`."""

    async def __call__(
        self, texts: Sequence[Sequence[int]], *, pooling: Pooling | None = None, normalize: bool = True
    ) -> npt.NDArray[np.float32]: ...


class Generation(Protocol):
    """A generation in progress, as :class:`~bitnet.core.Request` is: an asynchronous iterator over its chunks.

    Attributes:
        completion: The whole result, once the last chunk has been consumed.
    """

    @property
    def completion(self) -> Completion | None: ...
    def __aiter__(self) -> AsyncIterator[Chunk]: ...
    def cancel(self) -> None: ...


class Restriction(Protocol):
    """What limits the tokens of an answer."""

    def close(self) -> None:
        """Free it; its generations have ended."""
        ...


R = TypeVar("R", bound=Restriction)
G = TypeVar("G", bound=Generation)


class Backend(Protocol[R, G]):
    """What computes the answers of a model.

    Attributes:
        embed: Computes vectors of texts, while the event loop goes on.
    """

    @property
    def embed(self) -> Embed: ...

    @property
    def model(self) -> ServedModel: ...

    async def restrict(self, form: Form | None, rules: TokenRules | None, in_thread: InThread) -> R:
        """What holds answers to a form and to rules about tokens.

        Raises:
            RequestError: The form cannot be compiled, or the rules leave no token.
        """
        ...

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        options: OptionArguments,
        *,
        n: int = 1,
        restriction: R | None = None,
        receipt: bool = False,
        whole: bool = False,
    ) -> Sequence[G]:
        """Begin ``n`` continuations of each prompt. This is slow: call it outside the event loop.

        Args:
            receipt: Whether :meth:`receipt` will be called.
            whole: Whether only the completions are used, not the chunks: all may be computed anew, then.

        Raises:
            BitNetError: They cannot be begun; none was.
        """
        ...

    def receipt(self, generation: G) -> dict[str, Any]:
        """The receipt of a generation that has ended."""
        ...

    def close(self) -> None:
        """Free all but the model."""
        ...


class Rules:
    """The form and the token rules of a request, as constraints in this process."""

    def __init__(self, form: Constraints | LazyMatchers | None, constraint: MakesConstraint | None) -> None:
        self._form, self.constraint = form, constraint

    def close(self) -> None:
        if self._form is not None:
            self._form.close()


class InProcess:
    """A model in this process."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.embed: Embed = model.embed_async
        self.compiler = Compiler(model.tokenizer)

    async def restrict(self, form: Form | None, rules: TokenRules | None, in_thread: InThread) -> Rules:
        compiled = None if form is None else await self.compiler.compile(form, in_thread)
        if rules is None:
            return Rules(compiled, compiled)
        return Rules(compiled, await in_thread(lambda: rules.over(self.model.tokenizer, compiled)))

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        options: OptionArguments,
        *,
        n: int = 1,
        restriction: Rules | None = None,
        receipt: bool = False,
        whole: bool = False,
    ) -> Sequence[Request]:
        constraint = None if restriction is None else restriction.constraint
        return self.model.submit_batch(prompts, n=n, constraint=constraint, **options)

    def receipt(self, generation: Request, replica: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The receipt of a generation; ``replica`` as for :meth:`~bitnet.core.Model.receipt`."""
        assert generation.completion is not None
        return self.model.receipt(generation.completion, file_name=self.model.path.name, replica=replica)

    def close(self) -> None:
        self.compiler.close()
