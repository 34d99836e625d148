"""Chen et al., "Elastic Aggregation for Federated Optimization", and its supplement."""
