"""What engines that are HTTP servers have in common: their process, their requests, their labels and their proofs."""
