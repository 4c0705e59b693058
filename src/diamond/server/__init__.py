"""The service: store <- services <- api | web <- app."""
