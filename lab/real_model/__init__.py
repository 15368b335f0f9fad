"""Reinforcement learning with a real pretrained model: task, policy, arms, directions, units, records and page."""
