"""Karimireddy et al., "Mime: Mimicking Centralized Stochastic Algorithms in Federated Learning"."""
