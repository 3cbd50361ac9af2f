"""How forward and loss are compiled: torch's settings for it, and the folder that compiled code is kept in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

from danling.training import Compilation

from .artifacts import ArtifactDirectory
from .memory import MemoryPolicy, Recomputation


class GraphCompilation(Compilation):
    """Compiles under a memory policy, out of a folder of compiled code and into it.

    Every size of a batch has a graph of its own unless `dynamic` is set: what is computed with a batch then depends on nothing that the
    process has seen before, and a run that is resumed in the middle of an epoch computes the same.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        distributed: bool,
        policy: MemoryPolicy,
        artifacts: ArtifactDirectory | None,
        recomputation: Recomputation | None,
        barrier: Callable[[], None],
        leads: bool,
    ) -> None:
        given = {name: settings[name] for name in ("backend", "fullgraph", "dynamic", "mode", "options")}
        options = {"fullgraph": True, "dynamic": False}
        options |= {name: value for name, value in given.items() if value is not None}
        # What cuts a graph at the buckets of DistributedDataParallel cannot cut one with a part that is computed again.
        cuts = "no_optimization" if recomputation is not None else settings["optimize_ddp"]
        super().__init__(options, optimize_ddp=cuts if distributed else None, within=self._configured)
        self._artifacts = artifacts
        self._recomputation = recomputation
        self._barrier = barrier
        self._leads = leads
        self._several = distributed
        self._patches = _patches(policy, keeps_code=artifacts is not None)
        self._sealed = -1

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function compiled, whose errors say what to do about them."""
        call = super().function(function)
        errors: Any = import_module("torch._dynamo.exc")
        unsupported, too_many = (errors.Unsupported, errors.UserError), errors.FailOnRecompileLimitHit

        def checked(*args: Any) -> Any:
            try:
                return call(*args)
            except unsupported as error:
                raise RuntimeError(
                    f"Expected forward and loss that become one graph. Received: {str(error).partition(chr(10))[0]}; above stands where. "
                    "Take it out of the model or the loss, or set compile.fullgraph=false, which compiles the parts around it."
                ) from error
            except too_many as error:
                raise RuntimeError(
                    f"Expected batches of a few sizes, each of which is compiled. Received: more than torch compiles, with "
                    f"compile.dynamic={self.options['dynamic']}. Set compile.dynamic=true, which compiles one graph for all sizes, or "
                    "bring batches to fewer; a number that the loss reads and that changes compiles anew as well."
                ) from error

        return checked

    @contextmanager
    def _configured(self) -> Iterator[None]:
        with ExitStack() as stack:
            for patch in self._patches:
                stack.enter_context(patch)
            if self._artifacts is not None:
                stack.enter_context(self._artifacts.entered())
            if self._recomputation is not None:
                stack.enter_context(self._recomputation.entered())
            yield

    def open(self) -> None:
        """Look into the folder of compiled code. Call on all ranks."""
        if self._artifacts is None:
            return
        if self._leads:
            self._artifacts.open()
            with self.settings():
                self._artifacts.load_portable()
        self._barrier()
        if not self._leads:
            self._artifacts.open(leads=False)

    def after_first_update(self, *, speaks: bool) -> None:
        """Say when nothing was compiled, and list what was, while no process compiles. Call on all ranks."""
        if not self.calls:
            raise goes_its_own_way("one that does not")
        super().after_first_update(speaks=speaks)
        if self._artifacts is not None:
            self._barrier()
            self._seal(everything=True)
            self._barrier()

    def _seal(self, *, everything: bool) -> None:
        if self._artifacts is not None and self._leads and self.graphs > max(self._sealed, 0):
            self._artifacts.seal(everything=everything)
            self._sealed = self.graphs

    def close(self) -> None:
        """List what was compiled since, and let go of the folder. A second call does nothing."""
        self._seal(everything=not self._several)
        if self._artifacts is not None:
            self._artifacts.close()
        super().close()


def goes_its_own_way(received: str) -> ValueError:
    """Return the error for a `train_step` that leaves the compiled function out."""
    return ValueError(
        f"Expected a `train_step` that calls super().train_step(data): with stack='graph' that is the compiled function of forward and "
        f"loss. Received: {received}. Put what it computes into the model or `compute_loss`, or choose stack='ddp' with compile.enable."
    )


def _patches(policy: MemoryPolicy, *, keeps_code: bool) -> list[Any]:
    """Return the settings of torch's compiler, as contexts that may be entered again and again."""
    functorch: Any = import_module("torch._functorch.config")
    divided = policy.settings(functorch.joint_custom_pass)
    if keeps_code:
        divided["enable_autograd_cache"] = True
    # The pass is no part of the keys of torch's caches, in whatever folder they are.
    patches = [functorch.patch(divided), import_module("torch.compiler.config").patch(cache_key_tag=policy.tag)]
    if keeps_code:
        # A precompiled header lies outside of the folder, and the compiler is asked at each start whether it still fits.
        inductor = import_module("torch._inductor.config")
        patches.append(inductor.patch({"fx_graph_cache": True, "cpp_cache_precompile_headers": False}))
    return patches
