// The forward kernel on a CPU: `forward FOLDER H CLUSTERS SEED` reads problem, hidden, weight, target
// and raw_target in FOLDER, and writes partial and matrix.
#include "emulated.h"

#include <fstream>
#include <string>

#include "constants.h"
#include "forward.cu"

template <class T>
std::vector<T> read(const std::string& path, size_t count) {
    std::vector<T> values(count);
    std::ifstream file(path, std::ios::binary);
    REQUIRE(file.read(reinterpret_cast<char*>(values.data()), count * sizeof(T)), "no %s",
            path.c_str());
    return values;
}

template <class T>
void write(const std::string& path, const std::vector<T>& values) {
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

int main(int, char** arguments) {
    const std::string folder = std::string(arguments[1]) + "/";
    const int depth = std::atoi(arguments[2]), clusters = std::atoi(arguments[3]);
    const Problem p = read<Problem>(folder + "problem", 1)[0];
    const int64_t rows = p.rows, columns = p.columns, stride = (columns + 7) / 8 * 8;
    auto hidden = read<uint16_t>(folder + "hidden", rows * depth);
    auto weight = read<uint16_t>(folder + "weight", columns * depth);
    const auto target = read<int64_t>(folder + "target", rows);
    const auto raw_target = read<float>(folder + "raw_target", rows);
    std::vector<float> partial(3 * rows * p.column_tiles, NAN);
    std::vector<uint16_t> matrix(rows * stride, 0xffff);  // NaN
    const TensorMap hidden_map{hidden.data(), rows, depth, depth, kBlockT};
    const TensorMap weight_map{weight.data(), columns, depth, depth, kBlockV / 2};
    const TensorMap matrix_map{matrix.data(), rows, columns, stride, 16};
    launch(clusters, kThreads, std::atoi(arguments[4]), [&] {
        forward(hidden_map, weight_map, matrix_map, target.data(), raw_target.data(),
                partial.data(), p);
    });
    write(folder + "partial", partial);
    write(folder + "matrix", matrix);
}
