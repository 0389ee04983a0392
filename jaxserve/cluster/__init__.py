"""Several replicas of an engine behind one `EngineClient`, as actors of Ray."""
