"""The test kit: real servers, agents, databases and file systems for tests to use. Never shipped."""
