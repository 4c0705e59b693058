"""Programs that turn a recipe into an image, each behind the `Builder` protocol, and the job that drives them."""
