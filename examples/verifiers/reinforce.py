"""The trainer: REINFORCE with importance ratios, in plain PyTorch. It takes groups of sequences that share a task."""

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from midstream.client.records import TrainingSequence

RATIO_MOST = 2.0


class Reinforce:
    def __init__(self, base: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)

    def step(self, groups: list[list[TrainingSequence]]) -> None:
        self._optimizer.zero_grad()
        for group in groups:
            (self._loss(group) / len(groups)).backward()
        self._optimizer.step()

    def _loss(self, group: list[TrainingSequence]) -> torch.Tensor:
        def rows(name: str) -> torch.Tensor:
            return pad_sequence([torch.tensor(getattr(one, name)) for one in group], batch_first=True)

        ids, mask = rows("token_ids"), rows("loss_mask")[:, 1:]
        # Of each token behind the first: [sequences, tokens].
        logprobs = self.model(ids[:, :-1]).logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        ratios = (logprobs - rows("logprobs")[:, 1:]).exp().clamp(max=RATIO_MOST)
        rewards = torch.tensor([one.reward for one in group])
        return -(ratios * (rewards - rewards.mean())[:, None] * mask).sum() / mask.sum()
