"""Plans with recomputation: choice of levels and placement of R passes."""
