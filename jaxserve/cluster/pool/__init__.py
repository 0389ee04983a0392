"""The replicas of a router: loaded, lost, restarted, resized, added and removed."""
