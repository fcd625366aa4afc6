"""Checks in a vLLM's sources whether it still has what `cepo.rollout` uses of it beyond its documented interface.

    python -m lab.vllm_uses                     # the installed vLLM
    python -m lab.vllm_uses /tmp/wheel/vllm     # the folder of a wheel that was unpacked with `unzip`

The sources are read and not run, so that a wheel for GPUs can be checked anywhere. Exit code: 0 all is there, 1 not.
"""

from __future__ import annotations

import ast
import sys
from importlib.util import find_spec
from pathlib import Path

USES: dict[str, tuple[str, ...]] = {
    "lora/worker_manager.py": ("WorkerLoRAManager._adapter_manager", "WorkerLoRAManager.remove_all_adapters"),
    "lora/model_manager.py": (
        "LoRAModelManager.modules",
        "LoRAModelManager.packed_modules",
        "LoRAModelManager.add_adapter",
        "LoRAModelManager.activate_adapter",
    ),
    "lora/lora_model.py": (
        "LoRAModel.from_lora_tensors(lora_model_id, tensors, peft_helper, device, dtype, model_vocab_size, weights_mapper)",
    ),
    "lora/peft_helper.py": ("PEFTHelper.from_dict", "PEFTHelper.validate_legal"),
    "lora/utils.py": ("is_in_target_modules",),
    "config/lora.py": ("LoRAConfig.target_modules", "LoRAConfig.lora_dtype"),
    "model_executor/models/utils.py": ("WeightsMapper.get_rename_mapper",),
    "model_executor/layers/logits_processor.py": ("LogitsProcessor.head_dtype",),
    "distributed/parallel_state.py": ("_WORLD", "_NODE_COUNT", "destroy_model_parallel"),
    "renderers/base.py": ("BaseRenderer.render_cmpl(prompts)", "BaseRenderer.mm_processor_cache"),
    "renderers/inputs/preprocess.py": ("parse_model_prompt(model_config, prompt)",),
    "logprobs.py": ("FlatLogprobs.token_ids", "FlatLogprobs.logprobs"),
    "sampling_params.py": (
        "SamplingParams.flat_logprobs",
        "SamplingParams.logit_bias",
        "SamplingParams.allowed_token_ids",
        "RequestOutputKind.FINAL_ONLY",
    ),
    "entrypoints/llm.py": (
        "LLM.request_counter",
        "LLM.collective_rpc",
        "LLM.sleep(level)",
        "LLM.wake_up",
        "LLM.reset_prefix_cache",
        "LLM.reset_mm_cache",
    ),
    "v1/engine/llm_engine.py": (
        "LLMEngine.add_request(request_id, prompt, params, lora_request)",
        "LLMEngine.step",
        "LLMEngine.has_unfinished_requests",
        "LLMEngine.abort_request",
        "LLMEngine.reset_encoder_cache",
        "LLMEngine.vllm_config",
    ),
    "v1/engine/core_client.py": ("InprocClient.engine_core", "InprocClient._finalizer", "InprocClient.shutdown"),
    "v1/worker/gpu/model_runner.py": (
        "GPUModelRunner.reload_weights(weights_iterator)",
        "GPUModelRunner.get_model",
        "GPUModelRunner.shutdown",
    ),
    "v1/worker/worker_base.py": ("WorkerWrapperBase.worker",),
    "v1/worker/gpu/sample/logit_bias.py": ("MAX_NUM_LOGIT_BIAS_TOKENS",),
    "v1/sample/logits_processor/__init__.py": ("LogitsProcessor", "process_dict_updates"),
    "config/vllm.py": ("VllmConfig.use_v2_model_runner",),
    "utils/jit_monitor.py": ("_log_triton_jit_compile",),
    "device_allocator/cumem.py": ("libcudart",),
    "v1/worker/gpu/async_utils.py": ("AsyncOutput.get_output",),
}
"""Names by the file that defines them: a name, `class.attribute`, or a function with arguments that it must accept."""


def definitions(tree: ast.Module) -> dict[str, ast.AST]:
    """Returns what a module defines, imports or assigns, and the methods and attributes of its classes, by name."""
    names: dict[str, ast.AST] = {}
    for node in tree.body:
        names |= dict.fromkeys(_bound_names(node), node)
        if not isinstance(node, ast.ClassDef):
            continue
        for inner in ast.walk(node):
            for name in _bound_names(inner):
                names[f"{node.name}.{name}"] = inner
    return names


def _bound_names(node: ast.AST) -> list[str]:
    """Returns the names that a statement binds; of `self.name = ...` the attribute's."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    names: list[str] = []
    for target in targets:
        if isinstance(target, ast.Name):
            names.append(target.id)
        elif isinstance(target, ast.Attribute):
            names.append(target.attr)
    return names


def missing(folder: Path) -> list[str]:
    """Returns what a vLLM in `folder` lacks of `USES`, in words."""
    problems: list[str] = []
    for file, uses in USES.items():
        if not (folder / file).is_file():
            problems.append(f"{file} does not exist")
            continue
        defined = definitions(ast.parse((folder / file).read_text(encoding="utf-8")))
        for use in uses:
            name, _, arguments = use.rstrip(")").partition("(")
            if name not in defined:
                problems.append(f"{file} has no {name}")
                continue
            accepted = _arguments(defined[name])
            for argument in filter(None, arguments.split(", ")):
                if argument not in accepted:
                    problems.append(f"{file}: {name} does not accept {argument}")
    return problems


def _arguments(node: ast.AST) -> set[str]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return set()
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return {argument.arg for argument in every}


def main() -> int:
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1])
    else:
        spec = find_spec("vllm")
        if spec is None or spec.origin is None:
            raise SystemExit("vLLM is not installed; name the folder of an unpacked wheel")
        folder = Path(spec.origin).parent
    problems = missing(folder)
    total = sum(len(uses) for uses in USES.values())
    print("\n".join([*problems, f"{folder}: {total - len(problems)} of {total} uses are there"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
