"""An agent loop of verl's with three turns: between them the environment adds tokens, which are masked."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

TURNS = 3
ANSWER = [7, 8, 9, 10]  # what the environment says, as tokens


@register("three_turns")
class ThreeTurns(AgentLoopBase):
    """Generates, appends the environment's answer, and generates again, as token ids throughout."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        params = dict(sampling_params, max_tokens=self.rollout_config.response_length // TURNS - len(ANSWER))
        tokens, mask, logprobs, steps, cached = [], [], [], set(), []
        for turn in range(TURNS):
            output = await self.server_manager.generate(
                request_id=f"turns-{priority}", prompt_ids=prompt + tokens, sampling_params=params
            )
            tokens += output.token_ids
            mask += [1] * len(output.token_ids)
            logprobs += output.log_probs
            steps |= {output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]}
            cached.append(output.extra_fields["num_cached_tokens"])
            if turn < TURNS - 1:
                tokens += ANSWER
                mask += [0] * len(ANSWER)
                logprobs += [0.0] * len(ANSWER)
        print("cached tokens of the turns:", cached)
        fields = {"min_global_steps": min(steps), "max_global_steps": max(steps)}
        fields |= {"turn_scores": [], "tool_rewards": []}
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=tokens,
            response_mask=mask,
            response_logprobs=logprobs,
            num_turns=2 * TURNS,
            metrics={},
            extra_fields=fields,
        )
