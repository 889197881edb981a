"""What proposes: one file a method, behind the protocol of `protocol`."""
