"""What checks a run: digests of its state, replicas that agree, and programs that are trained again."""
