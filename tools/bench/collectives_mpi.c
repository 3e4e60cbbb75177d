/* The peer of collectives_bench.cpp under MPI, with the same calls, sizes and batches:
   mpirun -n N collectives_mpi BYTES... */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static float *data, *other;
static int size, which;
static long bytes;

static void call(void) {
  int part = (int)(bytes / size / 64 * 64 / 4);
  if (which == 0) MPI_Allreduce(MPI_IN_PLACE, data, (int)(bytes / 4), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  if (which == 1) MPI_Reduce_scatter_block(data, other, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  if (which == 2) MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, data, part, MPI_FLOAT, MPI_COMM_WORLD);
}
static int ascending(const void* a, const void* b) { return (*(double*)a > *(double*)b) - (*(double*)a < *(double*)b); }

int main(int argc, char** argv) {
  const char* names[] = {"all_reduce", "reduce_scatter", "all_gather"};
  int rank;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  long largest = atol(argv[argc - 1]);
  data = malloc(largest), other = malloc(largest / size);
  for (long i = 0; i < largest / 4; ++i) data[i] = 1;
  for (int a = 1; a < argc; ++a)
    for (which = 0, bytes = atol(argv[a]); which < 3; ++which) {
      double batches[7], calls;
      call();
      MPI_Barrier(MPI_COMM_WORLD);
      double began = MPI_Wtime();
      call();
      calls = 0.05 / (MPI_Wtime() - began);
      calls = calls < 1 ? 1 : calls > 2000 ? 2000 : calls;
      MPI_Allreduce(MPI_IN_PLACE, &calls, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
      for (int b = 0; b < 7; ++b) {
        MPI_Barrier(MPI_COMM_WORLD);
        began = MPI_Wtime();
        for (int i = 0; i < (int)calls; ++i) call();
        MPI_Barrier(MPI_COMM_WORLD);
        batches[b] = (MPI_Wtime() - began) / (int)calls;
      }
      qsort(batches, 7, sizeof(double), ascending);
      if (rank == 0) printf("%s %ld %.9f\n", names[which], bytes, batches[3]);
      for (long i = 0; i < largest / 4; ++i) data[i] = 1;
    }
  MPI_Finalize();
}
