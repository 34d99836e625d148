"""Charles and Konecny, "Convergence and Accuracy Trade-Offs in Federated Learning and Meta-Learning"."""
