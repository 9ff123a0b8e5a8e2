"""Miles' own rollout, which starts after the engines proved what they are and ends where a row cannot be trusted."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnInput, RolloutFnOutput
from miles.rollout.inference_rollout.inference_rollout_common import InferenceRolloutFn
from miles.rollout.inference_rollout.inference_rollout_train import get_worker_urls
from miles.utils.http_utils import get
from miles.utils.types import Sample

from miles_ext.errors import CapabilityError
from miles_ext.miles_adapter import generate, samples
from miles_ext.miles_adapter.arguments import add_arguments, settings_of, spec_of
from miles_ext.miles_adapter.preflight import Proof, prove, require_same_draft
from miles_ext.miles_adapter.refusals import refuse
from miles_ext.miles_adapter.versions import version


class Watch:
    """What generation and rollout tell each other, on Miles' shared state. proof: of the last time it was asked for."""

    def __init__(self) -> None:
        self.proof: Proof | None = None
        self.error: Exception | None = None
        self._failed: asyncio.Event | None = None

    def fail(self, error: Exception) -> None:
        """The first failure counts."""
        if self.error is None:
            self.error = error
        if self._failed is not None:
            self._failed.set()

    async def until_failed(self) -> None:
        self._failed = asyncio.Event()
        if self.error is None:
            await self._failed.wait()


class RolloutFn(InferenceRolloutFn):
    """--rollout-function-path."""

    add_arguments = staticmethod(add_arguments)

    def __init__(self, input: RolloutFnConstructorInput, *legacy: Any, **rest: Any) -> None:
        if legacy or rest:
            raise CapabilityError(
                "Miles calls its rollout function in the old form; set MILES_EXPERIMENTAL_ROLLOUT_REFACTOR=1 for "
                "miles-rl 0.0.2, and leave MILES_USE_LEGACY_ROLLOUT_V1 unset for later versions"
            )
        version("rollout")
        refuse(input.args)
        samples.follow(Sample)
        super().__init__(input)
        self.state.generate_function = generate.generate
        self.state.sc_watch = Watch()

    async def __call__(self, input: RolloutFnInput) -> RolloutFnOutput:
        watch = self.state.sc_watch
        proof = await ask_engines(self.state.args)
        require_same_draft(watch.proof, proof)
        watch.proof = proof
        if input.evaluation:
            return await super().__call__(input)
        return await until_failure(super().__call__(input), self.state)


async def ask_engines(args: Namespace) -> Proof:
    """Each engine itself is asked, past the router."""
    urls = await get_worker_urls(args)
    infos = await asyncio.gather(*(get(f"{url}/server_info") for url in urls))
    return prove(dict(zip(urls, infos, strict=True)), args, settings_of(args), spec_of(args))


async def until_failure(rollout: Any, state: Any) -> RolloutFnOutput:
    """The rollout's result, or the first failure of a request: Miles would log it and sample on without end."""
    working, failing = asyncio.ensure_future(rollout), asyncio.ensure_future(state.sc_watch.until_failed())
    try:
        await asyncio.wait({working, failing}, return_when=asyncio.FIRST_COMPLETED)
        if state.sc_watch.error is not None:
            state.aborted = True  # requests that have not started stay where they are
            raise state.sc_watch.error
        return working.result()
    finally:
        working.cancel()
        failing.cancel()
        await asyncio.gather(working, failing, return_exceptions=True)
