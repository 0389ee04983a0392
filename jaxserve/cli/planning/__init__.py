"""What several commands do before they run anything: described engines, loads, choices."""
