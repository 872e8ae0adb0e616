"""midstream: rollout serving for RL post-training, with weights that change mid-stream."""

__version__ = "0.2.0"
