// SPDX-License-Identifier: MIT
#include "digits.hpp"

#include <csv.h>
#include <fmt/format.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>

namespace mlp {
namespace {

/// libcsv's parser, freed at the end.
class csv_line_parser {
 public:
  csv_line_parser() {
    if (csv_init(&parser_, CSV_STRICT) != 0) {
      throw std::runtime_error{"read_digits: libcsv can't start"};
    }
  }
  ~csv_line_parser() { csv_free(&parser_); }
  csv_line_parser(csv_line_parser const&) = delete;
  csv_line_parser& operator=(csv_line_parser const&) = delete;

  /// Whether `line` is one whole row; its fields are then in `fields()`.
  bool parse(std::string const& line) {
    fields_.clear();
    rows_ = 0;
    auto const on_field = [](void* text, std::size_t size, void* self) {
      static_cast<csv_line_parser*>(self)->fields_.emplace_back(static_cast<char const*>(text),
                                                                size);
    };
    auto const on_row = [](int, void* self) { ++static_cast<csv_line_parser*>(self)->rows_; };
    return csv_parse(&parser_, line.data(), line.size(), on_field, on_row, this) == line.size() &&
           csv_parse(&parser_, "\n", 1, on_field, on_row, this) == 1 && rows_ == 1;
  }

  [[nodiscard]] std::vector<std::string> const& fields() const { return fields_; }

 private:
  csv_parser parser_{};
  std::vector<std::string> fields_;
  int rows_ = 0;
};

/// Where in which file an error is, and which rank found it.
struct place {
  std::filesystem::path const& file;
  int rank;
  std::size_t line;

  [[nodiscard]] std::runtime_error error(std::string_view expected, std::string_view actual) const {
    return std::runtime_error{
        fmt::format("read_digits: {}, line {}: expected {}, actual {} (rank {})", file.string(),
                    line, expected, actual, rank)};
  }
};

std::size_t read_integer(std::string const& field, std::size_t column, std::size_t largest,
                         place const& at) {
  std::size_t value = 0;
  char const* const end = field.data() + field.size();
  auto const [stop, status] = std::from_chars(field.data(), end, value);
  if (status != std::errc{} || stop != end || value > largest) {
    throw at.error(fmt::format("an integer from 0 to {} in column {}", largest, column + 1),
                   fmt::format("\"{}\"", field));
  }
  return value;
}

digit read_digit(std::vector<std::string> const& fields, place const& at) {
  if (fields.size() != pixel_count + 1) {
    throw at.error(fmt::format("{} columns", pixel_count + 1), fmt::to_string(fields.size()));
  }
  digit out{};
  for (std::size_t column = 0; column < pixel_count; ++column) {
    out.pixels[column] = static_cast<float>(read_integer(fields[column], column, 16, at)) / 16.0F;
  }
  out.label = read_integer(fields[pixel_count], pixel_count, class_count - 1, at);
  return out;
}

}  // namespace

digits read_digits(std::filesystem::path const& file, int rank) {
  std::ifstream in{file};
  std::string line;
  if (!in || (in.peek() == std::ifstream::traits_type::eof() && in.bad())) {
    throw std::runtime_error{
        fmt::format("read_digits: {}: expected a file that can be read, actual \"{}\" (rank {})",
                    file.string(), std::strerror(errno), rank)};
  }
  csv_line_parser parser;
  digits out;
  std::size_t index = 0;
  for (; std::getline(in, line); ++index) {
    place const at{file, rank, index + 1};
    if (!parser.parse(line)) {
      throw at.error(fmt::format("one row of {} columns", pixel_count + 1),
                     "a blank line or a broken quotation");
    }
    (index % 5 == 4 ? out.test : out.train).push_back(read_digit(parser.fields(), at));
  }
  if (in.bad()) {
    throw std::runtime_error{
        fmt::format("read_digits: {}: expected a file that can be read, actual \"{}\" (rank {})",
                    file.string(), std::strerror(errno), rank)};
  }
  if (out.test.empty()) {
    throw place{file, rank, index}.error("at least 5 lines", fmt::to_string(index));
  }
  return out;
}

std::filesystem::path default_digits() {
  std::filesystem::path const at_build{ZERO_EXAMPLES_DATA_DIR "/digits.csv"};
  std::error_code status;
  auto folder = std::filesystem::read_symlink("/proc/self/exe", status);
  while (!std::filesystem::exists(at_build, status) && folder.has_relative_path()) {
    folder = folder.parent_path();
    if (auto moved = folder / "examples/data/digits.csv"; std::filesystem::exists(moved, status)) {
      return moved;
    }
  }
  return at_build;
}

}  // namespace mlp
