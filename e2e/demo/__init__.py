"""`make demo`: a cluster, the operator, one DisaggInference, and a conversation whose KV can be watched moving."""
