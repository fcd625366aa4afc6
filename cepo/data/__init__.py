"""Problems, pictures, contexts, and the order in which problems are asked."""
