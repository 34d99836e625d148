"""Renard, "Notes on Federated Optimization": FedAvg on convex losses."""
