"""What vLLM selects for sparse MLA, on every chip and in every state of FlashInfer."""
