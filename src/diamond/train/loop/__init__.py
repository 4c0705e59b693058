"""The training loop that survives: what `diamond.train.run` is made of. Needs PyTorch 2.9 or newer, unlike the rest of
`diamond.train`; nothing imports it before a script asks for `run`."""
