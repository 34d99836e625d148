"""Pathak and Wainwright, "FedSplit: an algorithmic framework for fast federated optimization"."""
