"""What each launcher sets in the environment of a rank."""

from __future__ import annotations

# Rank 1 of 4 on the second node, as each launcher declares it.
ENVIRONMENTS = {
    "torchrun": {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "RANK": "5"},
    "DeepSpeed": {"LOCAL_SIZE": "4", "LOCAL_RANK": "1", "CROSS_SIZE": "2", "CROSS_RANK": "1", "WORLD_SIZE": "8"},
    "Open MPI": {
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_COMM_WORLD_RANK": "5",
    },
    "MPICH or Intel MPI": {"MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "1", "PMI_SIZE": "8", "PMI_RANK": "5"},
    "PALS": {"PALS_LOCAL_SIZE": "4", "PALS_LOCAL_RANKID": "1", "PALS_RANKID": "5", "PMI_SIZE": "8"},
    "MVAPICH": {
        "MV2_COMM_WORLD_LOCAL_SIZE": "4",
        "MV2_COMM_WORLD_LOCAL_RANK": "1",
        "MV2_COMM_WORLD_SIZE": "8",
    },
    "Slurm": {
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
        "SLURM_NODEID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS": "8",
        "SLURM_PROCID": "5",
    },
    "Flux": {"FLUX_JOB_SIZE": "8", "FLUX_JOB_NNODES": "2", "FLUX_TASK_LOCAL_ID": "1", "FLUX_TASK_RANK": "5"},
    "loadmaster": {"LOADMASTER_LOCAL_SIZE": "4", "LOADMASTER_LOCAL_RANK": "1"},
}
