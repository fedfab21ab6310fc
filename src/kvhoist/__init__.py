"""kvhoist: a hierarchical KV cache for LLM serving."""
