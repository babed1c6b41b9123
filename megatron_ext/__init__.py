"""Extensions to Megatron-Core for reinforcement learning of Mixture-of-Experts agents.

The sub-packages read in the order of the flow:

    task -> rollout -> trajectory -> reward -> step agreement -> rows
         -> scoring -> credit -> loss -> optimizer step -> weights -> engine

``trajectory``, ``credit`` and ``losses`` are pure and import neither Megatron nor an engine.
"""

__version__ = "0.1.0"
