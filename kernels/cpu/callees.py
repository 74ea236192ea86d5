"""How the functions that kernels call are compiled: to LLVM's code for the kernels, which optimise it as their own.

numba would also optimise each function by itself, with all that it calls, and make machine code of it, which nothing
runs: half of the time that LLVM takes. (numba's documentation, "Customizing the Compiler")
"""

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder, PassManager
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering, NativeParforLowering


class _CalleeLibrary(JITCodeLibrary):
    """A function's code as its callers link it: neither optimised nor made machine code."""

    def _optimize_final_module(self):
        pass

    def _finalize_final_module(self):
        self._finalized = True


class _ForCallers:
    """A lowering that makes no wrapper for Python or C and no machine code."""

    def run_pass(self, state):
        """Put the lowered function into `state` and make it known to those compiled later; return True: IR changed."""
        state.flags.no_compile = state.flags.no_cpython_wrapper = state.flags.no_cfunc_wrapper = True
        state.library = _CalleeLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        super().run_pass(state)  # type: ignore[misc]
        nothing: list = []
        key = nothing.index  # numba wants a builtin of its own for each function; to call this one is an error
        state.targetctx.insert_user_function(key, state.cr.fndesc, [state.library])
        state.cr = state.cr._replace(cfunc=key)
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class _CalleeLowering(_ForCallers, NativeLowering):
    _name = "callee_lowering"


@register_pass(mutates_CFG=True, analysis_only=False)
class _RegionLowering(_ForCallers, NativeParforLowering):
    _name = "region_lowering"


class CalleeCompiler(CompilerBase):
    """numba's own pipeline with another last step, for `njit(pipeline_class=...)`."""

    def define_pipelines(self):
        """Return the one pipeline."""
        lowerings = {NativeLowering: _CalleeLowering, NativeParforLowering: _RegionLowering}
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state).passes
        (lowering,) = lowerings.keys() & {step for step, _ in passes}  # else it's a numba whose callees we don't know
        pipeline = PassManager("callee")
        for step, description in passes:
            pipeline.add_pass(lowerings[step] if step is lowering else step, description)
        pipeline.finalize()
        return [pipeline]
