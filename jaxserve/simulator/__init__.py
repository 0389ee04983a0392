"""The engine on a virtual clock: the very EngineCore, over an executor that computes nothing."""
