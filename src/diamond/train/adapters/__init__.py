"""What `diamond.train` promises, for scripts whose loop belongs to another library: callbacks for the Hugging Face
Trainer and for Lightning. Nothing here is loaded before a script imports `adapters.huggingface` or
`adapters.lightning`, and nothing else of Diamond needs those libraries."""
