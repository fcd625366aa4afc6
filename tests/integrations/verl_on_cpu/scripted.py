"""verl's own loop of tools with a scripted server in place of an inference engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.workers.rollout.replica import TokenOutput


def call(name: str, arguments: str) -> str:
    """A turn that calls a tool, in the form that verl's parser `hermes` reads."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def turns_of(session: int, truth: str) -> tuple[str, ...]:
    """The model's turns in each of the four responses to a problem; the first and the last response are right."""
    scripts = (
        (call("multiply", '{"a": 6, "b": 3}'), f"\\boxed{{{truth}}}"),
        (call("divide", '{"a": 6, "b": 3}'), "\\boxed{-1}"),  # no such tool
        ("\\boxed{-2}",),
        (call("multiply", '{"a": 2, "b": 3}'), call("multiply", '{"a": 6, "b": 7}'), f"so \\boxed{{{truth}}}"),
    )
    return scripts[session]


class ScriptedServer:
    """Answers each request with the next of a response's turns."""

    def __init__(self, turns: Sequence[list[int]]) -> None:
        self._turns = list(turns)
        self.prompts: list[list[int]] = []

    async def generate(self, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        self.prompts.append(list(prompt_ids))
        return TokenOutput(token_ids=self._turns.pop(0))


class ScriptedToolLoop(ToolAgentLoop):
    """Runs verl's loop with the script's turns, and gives right responses the reward 1."""

    async def run(self, sampling_params: dict[str, Any], **options: Any) -> Any:
        truth = str(options["reward_model"]["ground_truth"])
        session = int(options["session_id"])
        # The rollouts of a prompt share its images, which verl decodes in threads, and Pillow's decoders are not made for
        # that.
        for message in options["raw_prompt"]:
            for part in message["content"]:
                if isinstance(part, dict) and "image" in part:
                    part["image"].load()
        turns: list[list[int]] = []
        for text in turns_of(session, truth):
            turns.append([*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id])
        self.server_manager = ScriptedServer(turns)
        output = await super().run(sampling_params, **options)
        output.reward_score = float(session in (0, 3))
        output.extra_fields["reward_extra_info"] = {"acc": output.reward_score}
        return output
