"""Scores of tokens under the policy and other weights: what credit edits ask for."""
